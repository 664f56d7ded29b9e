"""Two-level searches give what the plain ones of torch give, at every width, and what each row has is its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from microbatch.executor import vocabulary

#: Narrow, whole blocks, a short last block, a last block of one.
WIDTHS = (1, 50, 1024, 1025, 2048, 4999, 8192, 8193)


def rows(width: int, seed: int = 0, count: int = 5) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("width", WIDTHS)
def test_best_is_the_first_of_the_largest(width: int) -> None:
    values = rows(width).round()  # many are equal
    values[0, -1] = 50
    values[1] = float("-inf")
    values[2, width // 2] = float("nan")
    largest, ids = vocabulary.best(values)
    expected = values.max(-1)
    assert torch.equal(largest, expected.values) or largest.isnan().tolist() == [False, False, True, False, False]
    assert ids.tolist() == expected.indices.tolist() == values.argmax(-1).tolist()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 20, 128])
def test_top_is_that_of_torch(width: int, count: int) -> None:
    values, count = rows(width), min(count, width)
    values[0, -1], values[1, 0] = 60, 60
    values[2, : width - width // 2] = float("-inf")
    largest, ids = vocabulary.top(values, count)
    assert torch.equal(largest, values.topk(count).values)
    assert torch.equal(values.gather(1, ids), largest) and all(len(set(row)) == count for row in ids.tolist())


@pytest.mark.parametrize("width", WIDTHS)
def test_total_is_the_sum(width: int) -> None:
    weights = rows(width).exp()
    torch.testing.assert_close(vocabulary.total(weights), weights.sum(-1, dtype=torch.float64), rtol=1e-6, atol=0)


@given(st.sampled_from(WIDTHS), st.integers(0, 99), st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.9]))
def test_invert_finds_the_place_of_a_number(width: int, seed: int, number: float, share_of_zeros: float) -> None:
    weights = rows(width, seed).exp()
    weights[torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed)) < share_of_zeros] = 0.0
    weights[:, seed % width] = 1.0
    places = vocabulary.invert(weights, torch.full((len(weights),), number, dtype=torch.float64))
    cumulative = weights.double().cumsum(-1) / weights.double().sum(-1, keepdim=True)
    for row, place in enumerate(places.tolist()):
        below = float(cumulative[row, place - 1]) if place else 0.0
        assert weights[row, place] > 0 and below - 1e-6 <= number <= float(cumulative[row, place]) + 1e-6


@pytest.mark.parametrize("number", [0.0, 1.0 - 2**-53])
@pytest.mark.parametrize("place", [0, 63, 64, 4998])
def test_a_single_weight_is_always_picked(place: int, number: float) -> None:
    weights = torch.zeros(1, 4999)
    weights[0, place] = 1e-30
    assert vocabulary.invert(weights, torch.tensor([number], dtype=torch.float64)).tolist() == [place]


def test_rows_that_are_not_numbers_harm_nobody() -> None:
    weights = rows(4999).exp()
    numbers = torch.full((5,), 0.7, dtype=torch.float64)
    expected = vocabulary.invert(weights, numbers).tolist()
    weights[1], weights[3, 17] = float("nan"), float("inf")
    places = vocabulary.invert(weights, numbers).tolist()
    assert [places[i] for i in (0, 2, 4)] == [expected[i] for i in (0, 2, 4)]
    assert all(0 <= place < 4999 for place in places)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_is_the_same_alone(width: int) -> None:
    weights = rows(width, count=7).exp()
    numbers = torch.linspace(0, 0.99, 7, dtype=torch.float64)
    together = vocabulary.invert(weights, numbers), vocabulary.total(weights), vocabulary.best(weights)[1]
    for i in range(7):
        row = slice(i, i + 1)
        alone = vocabulary.invert(weights[row], numbers[row]), vocabulary.total(weights[row])
        assert (alone[0].item(), alone[1].item()) == (together[0][i].item(), together[1][i].item())
        assert vocabulary.best(weights[row])[1].item() == together[2][i].item()
