"""Out of memory, in every form that torch reports it in, made into our own error."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from microbatch.errors import OutOfMemoryError
from microbatch.executor.quiet import first_line

#: Parts of the messages of plain RuntimeErrors that mean the same: torch's allocator on a CPU, CUDA and its libraries.
_SIGNS: Final = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUDA out of memory",
    "_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device, or the host, had no memory left."""
    if isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextmanager
def memory_faults(what: str, device: torch.device) -> Iterator[None]:
    """Whatever runs out of memory inside comes out as ``OutOfMemoryError``, with the memory it held given back.

    The frames of a traceback keep the tensors of the step that failed; the next, smaller one needs that memory.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemoryError(f"out of memory in {what}: {first_line(error)}") from None
