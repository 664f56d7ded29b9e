"""The kernels compile for real GPUs, fit into them, and use their units for products of matrices."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What a program may have of a multiprocessor's shared memory: RTX 30 and 40, H100.
SHARED = {86: 99 * 1024, 90: 227 * 1024}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="triton's wheel has an assembler for x86-64")
@pytest.mark.parametrize(("capability", "names"), [(86, []), (90, ["llama 8B", "gpt-oss", "float32", "fp8"])])
def test_every_kernel_compiles_and_fits(capability: int, names: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, "-m", "tests.microbatch_kernels.compile_triton", str(capability), *names]
    done = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {f["kernel"] for f in found} == {"_write", "_decode", "_combine", "_prefill"}
    for kernel in found:
        assert kernel["shared"] <= SHARED[capability], kernel
        assert kernel["stack"] <= 64, f"its registers do not suffice: {kernel}"
        if kernel["kernel"] in ("_decode", "_prefill") and "float32" not in kernel["case"]:
            assert kernel["products"] > 0, kernel
