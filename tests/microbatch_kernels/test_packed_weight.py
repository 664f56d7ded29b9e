"""Products with packed weights: right for odd shapes, and the same bits for a row in any company."""

from __future__ import annotations

import ctypes

import pytest
import torch

from microbatch_kernels.packed_weight import PackedWeight

SHAPES = [(1, 1), (17, 5), (31, 17), (64, 576), (100, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("columns", "k"), SHAPES)
def test_products_and_rows_alone_and_together(columns: int, k: int, dtype: torch.dtype, library: ctypes.CDLL) -> None:
    torch.manual_seed(columns)
    weight, x, bias = torch.randn(columns, k), torch.randn(40, k), torch.randn(columns)
    packed = PackedWeight.pack(library, weight, dtype)
    kept = packed.unpack()
    torch.testing.assert_close(
        packed.linear(x, bias), (x.double() @ kept.double().T + bias).float(), atol=1e-4, rtol=1e-4
    )
    gated = packed.linear(x, gate=packed)
    product = x.double() @ kept.double().T
    torch.testing.assert_close(gated, (torch.nn.functional.silu(product) * product).float(), atol=1e-3, rtol=1e-4)
    whole = packed.linear(x)
    for rows in range(1, 41):
        assert torch.equal(packed.linear(x[:rows]), whole[:rows])
    index = torch.tensor([[0, columns - 1]])
    assert torch.equal(packed.rows(index), kept[index])
    if dtype == torch.float32:
        assert torch.equal(kept, weight)


def test_int8_is_off_by_half_a_step_at_most(library: ctypes.CDLL) -> None:
    weight = torch.randn(50, 30)
    weight[3] = 0
    error = (PackedWeight.pack(library, weight, torch.int8).unpack() - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 127 * 0.5001).all()


def test_join_and_part(library: ctypes.CDLL) -> None:
    width = library.microbatch_panel_width()
    weights = [torch.randn(n, 7) for n in (width, 2 * width, 5)]
    joint = PackedWeight.join([PackedWeight.pack(library, w) for w in weights])
    assert torch.equal(joint.unpack(), torch.cat(weights))
    assert torch.equal(joint.part(width, 2 * width).unpack(), weights[1])
    with pytest.raises(ValueError, match="does not begin a panel"):
        joint.part(1, 4)
    with pytest.raises(ValueError, match="fill whole panels"):
        PackedWeight.join([PackedWeight.pack(library, w) for w in reversed(weights)])


def test_rows_that_do_not_fit_are_refused(library: ctypes.CDLL) -> None:
    packed = PackedWeight.pack(library, torch.randn(9, 7))
    for x in (torch.randn(2, 8), torch.randn(2, 7).double()):
        with pytest.raises(ValueError, match="rows of float32 and length 7 fit"):
            packed.linear(x)
    for other, dtype in (
        (torch.randn(9, 8), torch.float32),
        (torch.randn(8, 7), torch.float32),
        (torch.randn(9, 7), torch.int8),
    ):
        with pytest.raises(ValueError, match="fit"):
            packed.linear(torch.randn(2, 7), gate=PackedWeight.pack(library, other, dtype))
    x = torch.randn(7, 3).T
    assert torch.equal(packed.linear(x), packed.linear(x.contiguous()))


@pytest.mark.parametrize(
    "bias",
    [
        torch.zeros(8),
        torch.zeros(10),
        torch.zeros(1, 9),
        torch.zeros(9).double(),
        torch.zeros(9, dtype=torch.bfloat16),
        torch.zeros(18)[::2],
        torch.zeros(9, device="meta"),
    ],
    ids=["short", "long", "matrix", "double", "bfloat16", "strided", "elsewhere"],
)
def test_a_bias_that_does_not_fit_is_refused(bias: torch.Tensor, library: ctypes.CDLL) -> None:
    packed = PackedWeight.pack(library, torch.randn(9, 7))
    with pytest.raises(ValueError, match="a bias of float32 and length 9 on the CPU fits, not "):
        packed.linear(torch.randn(2, 7), bias)
