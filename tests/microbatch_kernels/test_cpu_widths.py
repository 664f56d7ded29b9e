"""The C kernels compiled for processors with narrower vectors than this one may have."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
import torch

from microbatch_kernels import cpu_library
from microbatch_kernels.attention_cpu import CpuAttention
from microbatch_kernels.attention_naive import attention_naive
from microbatch_kernels.cpu_layer import CpuLayer
from microbatch_kernels.packed_weight import PackedWeight
from tests.microbatch_kernels.test_attention_cpu import random_case

#: Machine to columns of a panel: twice the lanes of a vector.
WIDTHS = {"x86-64": 8, "x86-64-v3": 16}

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="machines are named for x86-64")


@pytest.fixture(scope="module", params=sorted(WIDTHS))
def narrow(request: pytest.FixtureRequest, kernel_folder: Path) -> ctypes.CDLL:
    if request.param == "x86-64-v3" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor lacks AVX2")
    flags = [f"-march={request.param}" if flag.startswith("-march") else flag for flag in cpu_library._FLAGS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_library, "_FLAGS", tuple(flags))
        built: ctypes.CDLL = cpu_library.cpu_library.__wrapped__(kernel_folder)
    assert built.microbatch_panel_width() == WIDTHS[request.param]
    return built


def test_attention(narrow: ctypes.CDLL) -> None:
    attention = CpuAttention(narrow)
    for seed in range(60):
        case, spans = random_case(seed)
        query, inputs = case.step(spans)
        kv = case.store.kv[0]
        expected = attention_naive(query, kv, inputs, case.options)
        got = attention(query, kv, inputs, case.options)
        torch.testing.assert_close(got, expected, atol=3e-6, rtol=2e-5, msg=lambda m: f"seed {seed}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_linear(dtype: torch.dtype, narrow: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(40, 37), torch.randn(45)
    packed = PackedWeight.pack(narrow, torch.randn(45, 37), dtype)
    whole = packed.linear(x, bias)
    torch.testing.assert_close(whole, (x.double() @ packed.unpack().double().T + bias).float(), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(packed.linear(x[:rows], bias), whole[:rows]) for rows in range(1, 40))


def test_norm(narrow: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(70, 45), torch.randn(45)
    expected = torch.nn.functional.rms_norm(x, (45,), weight, eps=1e-6)
    torch.testing.assert_close(CpuLayer(narrow).rms_norm(x, weight, 1e-6), expected)
