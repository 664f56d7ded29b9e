"""The C kernels for a CPU: compiled by the system's compiler at first use, kept in a folder, called through ctypes.

They need nothing but a C compiler with OpenMP: no headers of torch, so a build serves every version of it. The name of
a build says what it was made of and for which processor, so a folder may be shared between machines.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import torch  # loaded first, so that its OpenMP runtime is the one that the library finds

logger = logging.getLogger(__name__)

_SOURCES: Final = Path(__file__).parent / "csrc"
_FLAGS: Final = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S: Final = 120


class CompileError(Exception):
    """The library cannot be built here; the message says why and what would help."""


@cache
def cpu_library(folder: Path) -> ctypes.CDLL:
    """The library, built into ``folder`` unless a build for these sources and this processor lies there.

    Raises ``CompileError``.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    path = folder / f"kernels-{_fingerprint(compiler or '')}.so"
    if not path.exists():
        if compiler is None:
            raise CompileError("there is no C compiler: install gcc, or name one in the environment variable CC")
        _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(f"cannot load {path}: {error}") from None


def _fingerprint(compiler: str) -> str:
    """Of the sources, how they are compiled and the processor's abilities: ``-march=native`` means these."""
    parts = [compiler, *_FLAGS, torch.backends.cpu.get_cpu_capability(), _processor()]
    parts += [path.read_text() for path in sorted(_SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: str, path: Path) -> None:
    """Into a file of its own first: two servers that start together must not see half a library."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            built = Path(scratch) / path.name
            command = [*compiler.split(), *_FLAGS, "-o", str(built), *map(str, sorted(_SOURCES.glob("*.c"))), "-lm"]
            logger.info("building the C kernels (once): %s", " ".join(command[:2]))
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
            if done.returncode:
                raise CompileError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
            built.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"cannot build the C kernels in {path.parent}: {error}") from None
