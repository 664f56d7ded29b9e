"""Libraries that talk on stderr, held back while we load; what matters comes out as our own one-line errors."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

#: bitsandbytes logs this for each linear layer of each step when the model is not float16.
_CAST_NOISE: Final = "MatMul8bitLt: inputs will be cast"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, warnings or log lines of transformers inside; its settings are as before afterwards."""
    from transformers.utils import logging as transformers_logging

    hf_logging: Any = transformers_logging  # partly untyped
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


@contextmanager
def quiet_gguf() -> Iterator[None]:
    """``quiet_transformers``, and no bar of the GGUF reader, which draws one with tqdm whatever is set."""
    from transformers import modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils
    bar = getattr(reader, "tqdm", None)
    if bar is not None:
        reader.tqdm = functools.partial(bar, disable=True)
    try:
        with quiet_transformers():
            yield
    finally:
        if bar is not None:
            reader.tqdm = bar


@contextmanager
def quiet_import(logger_name: str) -> Iterator[None]:
    """Nothing below an error from this logger inside (a library that announces optional parts it did not find)."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def silence_cast_noise() -> None:
    """Drop bitsandbytes' message on float16 casts (hundreds of lines a step); its other messages stay."""
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    if _drop_cast_noise not in logger.filters:
        logger.addFilter(_drop_cast_noise)


def _drop_cast_noise(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_CAST_NOISE)


def first_line(error: BaseException, limit: int = 300) -> str:
    """An error of a library in one line: its type when it says nothing, its first line of text otherwise."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
