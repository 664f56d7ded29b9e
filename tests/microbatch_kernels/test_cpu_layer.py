"""Norm and rotary positions in C against their formulas, below and above the number of rows that threads share."""

from __future__ import annotations

import ctypes

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from microbatch_kernels.cpu_layer import CpuLayer

ROWS = [1, 3, 63, 64, 130]


@pytest.fixture(scope="module")
def layer(library: ctypes.CDLL) -> CpuLayer:
    return CpuLayer(library)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [1, 5, 16, 33, 576])
def test_norm_is_the_formula(dim: int, rows: int, layer: CpuLayer) -> None:
    torch.manual_seed(dim)
    x, weight = torch.randn(rows, dim) * torch.logspace(-4, 4, rows)[:, None], torch.randn(dim)
    before = x.clone()
    exact = x.double()
    expected = weight * exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    got = layer.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got, expected.float(), atol=1e-6, rtol=1e-5)
    assert torch.equal(x, before), "the input stays"
    assert all(torch.equal(got[r : r + 1], layer.rms_norm(x[r : r + 1], weight, 1e-5)) for r in range(rows))


def test_norm_of_any_shape_of_views_and_of_nothing(layer: CpuLayer) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(20, 3, 4).permute(1, 2, 0), torch.ones(20)
    got = layer.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (20,), eps=1e-6))
    assert layer.rms_norm(torch.zeros(2, 20), weight, 1e-6).eq(0).all()
    assert layer.rms_norm(torch.zeros(0, 20), weight, 1e-6).shape == (0, 20)


def test_nan_stays_in_its_row(layer: CpuLayer) -> None:
    x = torch.randn(3, 20)
    x[1, 7] = float("nan")
    got = layer.rms_norm(x, torch.ones(20), 1e-6)
    assert got[1].isnan().all() and torch.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 20), (1, 1, 2), (4, 4, 64)])
def test_rotation_is_that_of_transformers(heads: int, kv_heads: int, dim: int, rows: int, layer: CpuLayer) -> None:
    """Of query and key as they lie beside each other and the value, which stays."""
    torch.manual_seed(rows)
    joint = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    cosines, sines = torch.randn(rows, dim), torch.randn(rows, dim)
    parts = torch.split(joint.clone().view(rows, -1, dim), [heads, kv_heads, kv_heads], 1)
    query, key = (part.transpose(0, 1)[None] for part in parts[:2])
    rotated = apply_rotary_pos_emb(query, key, cosines[None], sines[None])
    layer.rotate(joint, cosines, sines, heads + kv_heads)
    found = torch.split(joint.view(rows, -1, dim), [heads, kv_heads, kv_heads], 1)
    for got, expected in zip(found, rotated, strict=False):
        torch.testing.assert_close(got, expected[0].transpose(0, 1), atol=1e-6, rtol=1e-5)
    assert torch.equal(found[2], parts[2])
