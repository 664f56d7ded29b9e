"""The backend of the kernels: whole batches, the choice by name, and what it says where it cannot run."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from microbatch_kernels import attention_triton as module
from microbatch_kernels.attention_inputs import AttentionInputs
from microbatch_kernels.attention_torch import attention_torch
from microbatch_kernels.attention_triton import attention_triton, write_triton
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.layer_kv import LayerKV
from microbatch_kernels.quantized_kv import raw
from microbatch_kernels.store import KVStore, LayerSpec
from tests.microbatch_kernels.triton_cases import DEVICES, Case, device_named, make_batch

CUDA = torch.device("cuda")
BATCHES = {
    "decodes": Case((1, 1, 1), (1, 17, 63)),
    "prompts": Case((5, 31), (5, 31), window=7),
    "mixed": Case((3, 1, 7, 1), (20, 33, 40, 16), softcap=3.0, sinks=True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_of_a_batch_is_right(name: str, device: str) -> None:
    batch = make_batch(BATCHES[name], device)
    backend = choose_backend("triton", torch.device(device))
    assert (backend.name, backend.attend, backend.reads_on_device) == ("triton", attention_triton, True)
    batch.check(backend(batch.query, batch.kv, batch.inputs, batch.options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn])
def test_the_scales_of_the_pool_reach_the_kernels(storage: torch.dtype, device: str) -> None:
    batch = make_batch(Case((3, 1), (20, 33), kept_as=storage), device)
    assert batch.scales is not None
    kv = LayerKV(batch.kv.keys, batch.kv.values, batch.scales.keys, batch.scales.values)
    batch.check(attention_triton(batch.query, kv, batch.inputs, batch.options))


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_nobody(device: str) -> None:
    batch = make_batch(BATCHES["decodes"], device)
    nobody = AttentionInputs.build([], 16, torch.device(device))
    assert attention_triton(batch.query[:0], batch.kv, nobody, batch.options).shape == (0, 6, 64)


@pytest.mark.parametrize("device", DEVICES)
def test_its_own_way_to_store(device: str) -> None:
    place = device_named(device)
    assert choose_backend("triton", place).write == write_triton and not choose_backend("torch").reads_on_device
    kv = LayerKV(*torch.zeros(2, 3, 4, 1, 16, device=place))
    ones = torch.ones(2, 1, 16, device=place)
    write_triton(kv, ones, 2 * ones, torch.tensor([-1, 6], device=place))
    assert kv.keys[1, 2].eq(1).all() and kv.values[1, 2].eq(2).all() and kv.keys.sum() == 16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_eight_bits_are_stored_as_the_pools_store_them_and_padding_is_not(name: str, device: str) -> None:
    place = device_named(device)
    torch.manual_seed(0)
    spec = LayerSpec(2, 32, 16, torch.float32, place).stored_as(name)
    wanted, got = (KVStore([spec], 3, 4).kv[0] for _ in range(2))
    keys, values = torch.randn(4, 2, 32, device=place), torch.randn(4, 2, 16, device=place)
    slots = torch.tensor([5, -1, 13, -1], device=place)
    wanted.write(keys[[0, 2]], values[[0, 2]], slots[[0, 2]])
    write_triton(got, keys, values, slots)
    for a, b in zip(wanted.pools, got.pools, strict=True):
        assert a.any() and torch.equal(raw(a), raw(b))


def test_auto_takes_triton_on_a_gpu_and_says_once_where_it_does_not_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_backend("auto").name == "torch"
    monkeypatch.setattr(module, "problem", lambda device: None)
    assert choose_backend("auto", CUDA).attend == attention_triton
    monkeypatch.setattr(module, "problem", lambda device: "the moon is full")
    with caplog.at_level(logging.WARNING):
        assert choose_backend("auto", CUDA).attend == attention_torch
    assert "the moon is full; torch operators serve instead" in caplog.text
    with pytest.raises(ValueError, match="'triton' does not run: the moon is full"):
        choose_backend("triton", CUDA)


def test_without_the_package_it_names_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "microbatch_kernels.attention_triton", None)
    monkeypatch.delattr("microbatch_kernels.attention_triton")
    with pytest.raises(ValueError, match=r"pip install 'microbatch\[gpu\]'"):
        choose_backend("triton", CUDA)
    assert choose_backend("auto", CUDA).name == "torch"


def test_kernels_are_tried_before_a_gpu_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TRITON_INTERPRET" in str(module.problem(CUDA)) or torch.cuda.is_available()
    monkeypatch.setattr(module, "INTERPRETED", False)
    assert "it needs a CUDA device, and K/V is on cpu" in str(module.problem(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert "Tesla T4 is none" in str(module.problem(CUDA))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    tried: list[torch.device] = []
    monkeypatch.setattr(module, "_try_out", tried.append)
    assert module.problem(CUDA) is None and tried == [CUDA]

    def broken(device: torch.device) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(module, "_try_out", broken)
    assert "RuntimeError: no C compiler" in str(module.problem(CUDA))


def test_the_trial_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    device_named("cpu")
    module._try_out(torch.device("cpu"))
    monkeypatch.setattr(module, "write_slots", lambda *_: None)
    with pytest.raises(RuntimeError, match="wrote nothing"):
        module._try_out(torch.device("cpu"))


def test_by_name_without_gpu_or_interpreter_it_fails_and_loads_nothing_otherwise() -> None:
    program = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
import torch
from microbatch_kernels.dispatch import choose_backend
choose_backend("auto")
assert "microbatch_kernels.attention_triton" not in sys.modules
try:
    choose_backend("triton")
except ValueError as error:
    print(error)
"""
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}:{root / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (
        "attention backend 'triton' does not run: it needs a CUDA device, and K/V is on cpu",
        "",
    )
