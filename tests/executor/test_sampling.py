"""Sampling: against brute force, row by row the same whatever the batch, and the odd values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from microbatch.core.plan import Admitted
from microbatch.core.request import SamplingParams
from microbatch.executor.draws import uniform
from microbatch.executor.filters import draw
from microbatch.executor.penalties import Adjustment, Adjustments
from microbatch.executor.sampling import Sampler

VOCAB = 50
CPU = torch.device("cpu")


def allowed(logits: list[float], p: SamplingParams) -> tuple[list[int], list[float]]:
    """Brute force: the tokens that the filters leave, best first, and their shares."""
    weights = [math.exp((x - max(logits)) / p.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    if p.top_k > 0:
        order = order[: p.top_k]
    total, mass = sum(weights[i] for i in order), 0.0
    kept: list[int] = []
    for i in order:
        if mass >= p.top_p * total and kept:
            break
        kept.append(i)
        mass += weights[i]
    kept = [i for i in kept if weights[i] >= p.min_p]
    total = sum(weights[i] for i in kept)
    return kept, [weights[i] / total for i in kept]


@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.01, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, -1, 2, 7, VOCAB, 10**9]),
    top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    u=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_among_the_allowed_and_at_its_place(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed % 2**32)) * 3
    token = int(draw(logits[None], [params], [u]))
    kept, shares = allowed(logits.double().tolist(), params)
    assert token in kept
    order = sorted(kept) if params.top_k <= 0 and params.top_p >= 1 else kept
    below = sum(shares[kept.index(i)] for i in order[: order.index(token)])
    assert below - 1e-4 <= u <= below + shares[kept.index(token)] + 1e-4


def test_a_row_is_the_same_in_any_company() -> None:
    torch.manual_seed(1)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_p": 0.999}]
    kinds.append({"top_k": 3, "top_p": 0.5, "temperature": 0.4})
    params = [SamplingParams(**{"temperature": 1.0, **k}) for k in kinds]
    logits = torch.randn(len(params), 5000)
    uniforms = [0.1, 0.3, 0.5, 0.7, 0.9, 0.99]
    together = draw(logits, params, uniforms)
    for i in range(len(params)):
        assert int(draw(logits[i : i + 1], [params[i]], [uniforms[i]])) == int(together[i])
    back = list(range(len(params)))[::-1]
    assert (
        draw(logits[back], [params[i] for i in back], [uniforms[i] for i in back]).tolist() == together.tolist()[::-1]
    )


def test_a_flat_distribution_needs_more_than_the_first_candidates() -> None:
    logits = torch.zeros(1, 5000)
    tokens = {int(draw(logits, [SamplingParams(top_p=0.99)], [k / 50])) for k in range(50)}
    assert len(tokens) > 45 and len({t // 1250 for t in tokens}) == 4
    assert int(draw(logits + torch.arange(5000) * -1e-6, [SamplingParams(top_k=3000)], [0.9999])) in range(2990, 3000)


def test_uniform_numbers_are_uniform_and_depend_on_both() -> None:
    numbers = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert len(set(numbers)) == 2000 and 0 <= min(numbers) and max(numbers) < 1
    assert abs(sum(numbers) / 2000 - 0.5) < 0.02
    counts = [sum(k / 10 <= x < (k + 1) / 10 for x in numbers) for k in range(10)]
    assert sum((c - 200) ** 2 / 200 for c in counts) < 28
    assert uniform(2**64 + 5, 3) == uniform(5, 3) and 0 <= uniform(-1, 0) < 1


def sampler(*rows: dict[str, Any], output: tuple[int, ...] = ()) -> Sampler:
    made = Sampler(VOCAB, [2], CPU)
    for seq_id, fields in enumerate(rows):
        made.admit(Admitted(seq_id, (5, 6, 5), output, 9), SamplingParams(**{"temperature": 0, **fields}))
    return made


def test_greedy_rows_take_the_best() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 7], logits[1, 9] = 1, 1
    assert sampler({}, {"temperature": 1e-5}).sample(logits, [0, 1]).token_ids == {0: 7, 1: 9}
    assert sampler({"temperature": 2, "top_k": 1}).sample(logits[1:].clone(), [0]).token_ids == {0: 9}


def test_a_row_of_nan_is_an_error_of_its_own() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[0, 3] = float("nan")
    logits[1] = float("-inf")
    logits[2, 4] = float("inf")
    logits[3, 5] = 1
    sampled = sampler({"logprobs": 1}, {}, {"temperature": 1}, {}).sample(logits, [0, 1, 2, 3])
    assert set(sampled.errors) == {0, 1, 2} and sampled.token_ids == {3: 5} and sampled.logprobs == {}


def test_bias_forces_bans_and_stays_in_its_row() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 5
    made = sampler({"logit_bias": {11: 100}}, {"logit_bias": {7: -100}}, {})
    tokens = made.sample(logits, [0, 1, 2]).token_ids
    assert tokens[0] == 11 and tokens[1] != 7 and tokens[2] == 7


def test_min_tokens_hold_back_end_and_stop_tokens_until_then() -> None:
    made = sampler({"min_tokens": 2, "stop_token_ids": (4,), "logit_bias": {2: 100, 4: 90}})
    seen = [made.sample(torch.zeros(1, VOCAB), [0]).token_ids[0] for _ in range(3)]
    assert seen[0] not in (2, 4) and seen[1] not in (2, 4) and seen[2] == 2
    resumed = sampler({"min_tokens": 2, "logit_bias": {2: 100}}, output=(8, 8))
    assert resumed.sample(torch.zeros(1, VOCAB), [0]).token_ids[0] == 2


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(0)
    logits = torch.randn(1, VOCAB)
    logits[0, 5], logits[0, 6] = 4.0, -0.1
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[5, 6, 5, 8]]), logits.clone())
    params = SamplingParams(repetition_penalty=1.3)
    rows = logits.repeat(3, 1)
    Adjustments([(1, Adjustment(Admitted(0, (5, 6, 5), (8,), 0), params, VOCAB, [2]))], CPU).apply(rows)
    torch.testing.assert_close(rows, torch.cat([logits, expected, logits]))


def test_presence_and_frequency_count_the_output_alone() -> None:
    made = sampler({"presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 0})
    base = torch.zeros(1, VOCAB)
    base[0, 5], base[0, 6], base[0, 7] = 3.1, 2.0, 0.9
    seen = [made.sample(base.clone(), [0]).token_ids[0] for _ in range(6)]
    # The first use of a token costs 1.5, each further one 0.5 more: 3.1, 1.6, 1.1, 0.6 for 5 and 2.0, 0.5 for 6.
    assert seen == [5, 6, 5, 5, 7, 5]
    resumed = sampler({"presence_penalty": 1.0, "frequency_penalty": 0.5}, output=tuple(seen[:3]))
    assert resumed.sample(base.clone(), [0]).token_ids[0] == seen[3]


def adjusted(row: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The definition, one token after the other."""
    row = list(row)
    for i in range(VOCAB):
        if i in prompt + output:
            row[i] = row[i] / params.repetition_penalty if row[i] > 0 else row[i] * params.repetition_penalty
        row[i] -= params.frequency_penalty * output.count(i) + params.presence_penalty * (i in output)
        row[i] += params.logit_bias.get(i, 0.0)
        if len(output) < params.min_tokens and i in (2, *params.stop_token_ids):
            row[i] = float("-inf")
    return row


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.4, 1.1]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.5]), max_size=3),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
)


@given(st.lists(st.tuples(PARAMS, TOKENS, TOKENS, TOKENS), min_size=1, max_size=4), st.integers(0, 99))
def test_adjustments_of_many_rows_are_those_of_each(
    rows: list[tuple[SamplingParams, list[int], list[int], list[int]]], seed: int
) -> None:
    logits = torch.randn(len(rows) + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    expected = [adjusted(logits[i].tolist(), p, prompt, out + new) for i, (p, prompt, out, new) in enumerate(rows)]
    wanting = []
    for i, (params, prompt, out, new) in enumerate(rows):
        if Adjustment.needed(params):
            adjustment = Adjustment(Admitted(i, tuple(prompt), tuple(out), 0), params, VOCAB, [2, VOCAB + 7])
            for token_id in new:
                adjustment.append(token_id)
            wanting.append((i, adjustment))
    untouched = logits[-1].clone()
    Adjustments(wanting, CPU).apply(logits)
    torch.testing.assert_close(logits[:-1], torch.tensor(expected))
    assert torch.equal(logits[-1], untouched)


def test_rows_may_change_places_leave_and_come_back_as_others() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 7], logits[1, 9] = 1, 1
    made = sampler({"logit_bias": {3: 50}}, {})
    assert made.sample(logits.clone(), [0, 1]).token_ids == {0: 3, 1: 9}
    assert made.sample(logits.clone(), [1, 0]).token_ids == {1: 7, 0: 3}
    assert made.sample(logits[:1].clone(), [1]).token_ids == {1: 7}
    made.release([0])
    made.admit(Admitted(0, (5,), (), 9), SamplingParams(temperature=0))
    assert made.sample(logits.clone(), [1, 0]).token_ids == {1: 7, 0: 9}
    made.admit(Admitted(0, (5,), (), 9), SamplingParams(temperature=0, logit_bias={4: 50}))
    assert made.sample(logits.clone(), [1, 0]).token_ids == {1: 7, 0: 4}


def test_random_and_greedy_rows_of_one_batch_are_those_of_each_alone() -> None:
    torch.manual_seed(5)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1}, {"logprobs": 3}, {"temperature": 1, "top_p": 0.7}]
    steps = [torch.randn(4, 5000) * 2 for _ in range(3)]
    together = sampler(*kinds)
    got = [together.sample(x.clone(), [0, 1, 2, 3]) for x in steps]
    for row in range(4):
        alone = sampler(*kinds)
        for x, sampled in zip(steps, got):
            mine = alone.sample(x[row : row + 1].clone(), [row])
            assert mine.token_ids[row] == sampled.token_ids[row]
            assert mine.logprobs.get(row) == sampled.logprobs.get(row)


def test_logprobs_are_raw_and_of_the_chosen_token() -> None:
    torch.manual_seed(3)
    logits = torch.randn(1, VOCAB)
    raw = logits[0].log_softmax(-1)
    fields = {"temperature": 0.5, "top_p": 0.5, "logit_bias": {9: 100.0}, "logprobs": 5}
    sampled = sampler(fields).sample(logits.clone(), [0])
    assert sampled.token_ids[0] == 9
    assert sampled.logprobs[0].logprob == pytest.approx(raw[9].item(), abs=1e-5)
    assert [i for i, _ in sampled.logprobs[0].top] == raw.topk(5).indices.tolist()
    assert sampler({"logprobs": 0}).sample(logits.clone(), [0]).logprobs[0].top == ()


def test_seeded_rows_go_on_where_they_were_after_a_preemption() -> None:
    torch.manual_seed(4)
    steps = [torch.randn(1, VOCAB) for _ in range(6)]
    whole = sampler({"temperature": 1.0})
    tokens = [whole.sample(x.clone(), [0]).token_ids[0] for x in steps]
    resumed = sampler({"temperature": 1.0}, output=tuple(tokens[:3]))
    assert [resumed.sample(x.clone(), [0]).token_ids[0] for x in steps[3:]] == tokens[3:]


def test_released_sequences_are_forgotten() -> None:
    made = sampler({}, {})
    made.release([0, 99])
    with pytest.raises(KeyError):
        made.sample(torch.zeros(1, VOCAB), [0])
