"""``bench.gpu`` without a GPU: it says so, and its measuring works on shapes that the interpreter can do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu_ops import Shape, Stopwatch, copy_bandwidth, measure_decode, measure_prefill, measure_write
from tests.microbatch_kernels.triton_cases import device_named

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "bench.gpu"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "bench.gpu: no CUDA device here, nothing was measured\n"


def test_every_operation_can_be_measured() -> None:
    device, shape = device_named("cpu"), Shape(2, 1, 16, torch.float32)
    watch = Stopwatch(device, repeats=1, flushed_bytes=1)
    bandwidth = copy_bandwidth(watch, device, 2**16)
    written = measure_write(watch, bandwidth, device, 2, shape)
    decoded = measure_decode(watch, bandwidth, device, 2, 20, shape)
    prefilled = measure_prefill(watch, bandwidth, device, 4, 20, shape)
    for figures in (written, decoded, prefilled):
        assert figures["us"] > 0 and figures["torch_us"] > 0 and figures["gb_per_s"] >= 0 and figures["share"] >= 0
    assert decoded["rows"] == 2 and prefilled["new"] == 4 and "tflops" in prefilled
