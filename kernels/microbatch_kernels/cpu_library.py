"""The C kernels for a CPU: compiled by the system's compiler at first use, kept in a folder, called through ctypes.

They need nothing but a C compiler with OpenMP: no headers of torch, so a build serves every version of it. The name of
a build says what it was made of and for which processor, so a folder may be shared between machines; and what it holds,
so one that a crash or a full disk has cut short is seen before it is loaded, and made again.
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
    """The library, built into ``folder`` unless a sound build for these sources and this processor lies there.

    Raises ``CompileError``.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    name = f"kernels-{_fingerprint(compiler or '')}"
    path = _sound_build(folder, name)
    if path is not None:
        return _load(path)
    if compiler is None:
        raise CompileError("there is no C compiler: install gcc, or name one in the environment variable CC")
    return _build(compiler, folder, name)


def _sound_build(folder: Path, name: str) -> Path | None:
    """A build of that name with the content that it was made with: loading a part of a library can end the process.
    Damaged ones are removed where they can be."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        try:
            if path.name == _named(name, path):
                return path
            logger.warning("%s is damaged and will be built again", path)
            path.unlink()
        except OSError as error:
            logger.warning("cannot use %s: %s", path, error)
    return None


def _named(name: str, path: Path) -> str:
    return f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.so"


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(f"cannot load {path}: {error}") from None


def _fingerprint(compiler: str) -> str:
    """Of the sources, how they are compiled and the processor's abilities: ``-march=native`` means these."""
    sources = sorted(_SOURCES.glob("*.[ch]"))
    if not sources:
        raise CompileError(f"the sources of the C kernels are not in {_SOURCES}: install microbatch again")
    parts = [compiler, *_FLAGS, torch.backends.cpu.get_cpu_capability(), _processor()]
    parts += [path.read_text() for path in sources]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _build(compiler: str, folder: Path, name: str) -> ctypes.CDLL:
    """In a folder of its own first: two servers that start together must not see half a library. It gets its name only
    once it has been loaded, so that a build that cannot be loaded is not found again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / f"{name}.so"
            _compile(compiler, built)
            library = _load(built)
            built.replace(folder / _named(name, built))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"cannot build the C kernels in {folder}: {error}") from None
    return library


def _compile(compiler: str, built: Path) -> None:
    command = [*compiler.split(), *_FLAGS, "-o", str(built), *map(str, sorted(_SOURCES.glob("*.c"))), "-lm"]
    logger.info("building the C kernels (once): %s", " ".join(command[:2]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    if done.returncode:
        raise CompileError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
