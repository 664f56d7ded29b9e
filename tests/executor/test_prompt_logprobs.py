"""Log-probabilities of prompts: those of transformers' own dense forward, whatever the executor does beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microbatch.core.plan import TokenLogprobs
from microbatch.core.policies import ContinuousPolicy, WindowPolicy
from microbatch.core.ports import Executor
from microbatch.core.request import FinishReason, Request, SamplingParams
from microbatch.core.scheduler import Scheduler
from microbatch.core.sequence import Sequence
from microbatch.executor import prompt_scores
from microbatch.executor.head import Head
from microbatch_kernels.manager import PagedKVManager
from tests.executor import test_generate, test_paged
from tests.executor.tiny import FAMILIES, FOREIGN, greedy_alone, tiny_model

BLOCK = test_paged.BLOCK
PROMPTS = [[5 + (i * 7 + k * k) % 80 for i in range(length)] for k, length in enumerate([1, 30, 3, 17, 8])]
TOP = 3


def truth(family: str, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities ``[T, V]`` of a plain forward."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    logprobs: torch.Tensor = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    return logprobs


def check(got: list[TokenLogprobs], family: str, prompt: list[int]) -> None:
    assert len(got) == len(prompt) - 1
    for entry, row, token_id in zip(got, truth(family, prompt), prompt[1:]):
        assert abs(entry.logprob - float(row[token_id])) < 1e-3
        low, high = (int((row > row[token_id] + near).sum()) for near in (1e-4, -1e-4))  # ties may fall either way
        assert low < entry.rank <= high
        values, ids = row.topk(TOP)
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-3)
        assert [token for token, _ in entry.top] == ids.tolist() or values.diff().abs().min() < 1e-3


def run(s: Scheduler, executor: Executor, **params: Any) -> list[Sequence]:
    """All prompts; every second one is scored."""
    sequences = []
    for k, prompt in enumerate(PROMPTS):
        scored = {"prompt_logprobs": TOP} if k % 2 or "max_tokens" in params else {}
        sampling = SamplingParams(**{"max_tokens": 3, "temperature": 0, **scored, **params})
        assert sampling.max_tokens is not None
        request = Request(f"{s.counters.prefix_query_tokens}-{k}", tuple(prompt), sampling, float(k))
        sequences += s.add(request, seed=k, max_total_tokens=len(prompt) + sampling.max_tokens)
    while (plan := s.schedule(100.0)) is not None:
        s.apply(executor.execute(plan), 100.0)
        s.check_integrity()
    assert s.idle and s.kv.num_free_blocks == s.kv.num_blocks
    return sequences


def check_all(sequences: list[Sequence], family: str) -> None:
    for k, sequence in enumerate(sequences):
        assert sequence.output_token_ids == greedy_alone(tiny_model(family), PROMPTS[k], 3)
        if k % 2:
            check(sequence.prompt_logprobs, family, PROMPTS[k])
        else:
            assert not sequence.prompt_logprobs


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_steps_score_as_a_dense_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "_SLICE", 96 * 5)  # several slices, the last one shorter
    executor = test_paged.executor_for(tiny_model(family))
    for budget in (2048, 7):
        kv = PagedKVManager(128, BLOCK)
        s = Scheduler(kv, ContinuousPolicy(max_num_seqs=8), max_num_batched_tokens=budget)
        check_all(run(s, executor), family)


@pytest.mark.parametrize("family", sorted({**FAMILIES, **FOREIGN}))
def test_padded_batches_score_as_a_dense_forward(family: str) -> None:
    executor = test_generate.executor_for(tiny_model(family), expect_paged=family in FAMILIES)
    for batch in (8, 2):
        kv = PagedKVManager(128, BLOCK, prefix_cache=family in FAMILIES)
        check_all(run(Scheduler(kv, WindowPolicy(max_batch_size=batch, window_ms=0)), executor), family)
    executor.close()


@pytest.mark.parametrize("policy", ["continuous", "window"])
def test_prompts_alone_are_scored_and_nothing_is_generated(policy: str) -> None:
    model, kv = tiny_model("llama"), PagedKVManager(128, BLOCK)
    if policy == "window":
        executor: Executor = test_generate.executor_for(model)
        s = Scheduler(kv, WindowPolicy(max_batch_size=3, window_ms=0))
    else:
        executor = test_paged.executor_for(model)
        s = Scheduler(kv, ContinuousPolicy(max_num_seqs=8), max_num_batched_tokens=11)
    for sequence, prompt in zip(run(s, executor, max_tokens=0), PROMPTS, strict=True):
        assert sequence.output_token_ids == [] and sequence.finish_reason is FinishReason.LENGTH
        check(sequence.prompt_logprobs, "llama", prompt)
    executor.close()


def test_preemption_in_the_middle_of_a_prompt_changes_no_score() -> None:
    executor = test_paged.executor_for(tiny_model("llama"))
    s = test_paged.make_scheduler(num_blocks=14, budget=9)
    sequences = run(s, executor, max_tokens=18)
    assert s.counters.num_preemptions > 0
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        check(sequence.prompt_logprobs, "llama", prompt)


@pytest.mark.parametrize("policy", ["continuous", "window"])
def test_a_model_whose_head_cannot_be_run_apart_fails_these_requests_alone(policy: str) -> None:
    model, kv = tiny_model("llama"), PagedKVManager(128, BLOCK)
    forward = model.forward

    def scaled(**options: Any) -> Any:
        """Logits that depend on more than the hidden states."""
        output = forward(**options)
        output.logits = output.logits * (2.0 if options.get("use_cache") or "paged" in options else 1.0)
        return output

    if policy == "window":
        executor: Executor = test_generate.executor_for(model)
        s = Scheduler(kv, WindowPolicy(max_batch_size=8, window_ms=0))
    else:
        executor = test_paged.executor_for(model)
        s = Scheduler(kv, ContinuousPolicy(max_num_seqs=8))
    model.forward = scaled
    reasons = [sequence.finish_reason for sequence in run(s, executor)]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR] * 2 + [FinishReason.LENGTH]
    executor.close()


@pytest.mark.parametrize("policy", ["continuous", "window"])
def test_what_is_not_a_number_is_an_error_and_no_score(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kv = tiny_model("llama"), PagedKVManager(128, BLOCK)
    if policy == "window":
        executor: Executor = test_generate.executor_for(model)
        s = Scheduler(kv, WindowPolicy(max_batch_size=8, window_ms=0))
    else:
        executor = test_paged.executor_for(model)
        s = Scheduler(kv, ContinuousPolicy(max_num_seqs=8))
    logits = Head.logits
    monkeypatch.setattr(Head, "fits", lambda *arguments: True)
    monkeypatch.setattr(Head, "logits", lambda self, hidden: logits(self, hidden) * float("nan"))
    reasons = [sequence.finish_reason for sequence in run(s, executor)]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR] * 2 + [FinishReason.LENGTH]
    executor.close()
