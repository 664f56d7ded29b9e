"""The C kernels, built once for all tests."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from microbatch_kernels.cpu_library import CompileError, cpu_library


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built library; a machine without a compiler skips, CI must have one."""
    folder = tmp_path_factory.mktemp("kernels")
    try:
        cpu_library(folder)
    except CompileError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="session")
def library(kernel_folder: Path) -> ctypes.CDLL:
    """The built library."""
    return cpu_library(kernel_folder)
