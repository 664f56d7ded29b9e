"""Answers held to a form while they are sampled: only their rows, from where a preemption left them."""

from __future__ import annotations

import pytest
import torch

from microbatch.core.plan import Admitted
from microbatch.core.request import SamplingParams
from microbatch.core.structured import StructuredOutput
from microbatch.executor.sampling import Sampler
from microbatch.text.bytes_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, ByteTokenizer
from microbatch.text.forms.matching import GuidedForms
from microbatch.text.forms.vocabularies import of_tokens

CPU = torch.device("cpu")
FORMS = GuidedForms(lambda: of_tokens(ByteTokenizer()))
DIGITS = SamplingParams(temperature=0, structured_output=StructuredOutput("regex", "[0-9]{3}"))


def sampler(vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(vocab_size, [EOS_TOKEN_ID], CPU, FORMS)


def random_logits(rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 4}])
def test_rows_with_a_form_keep_to_it_and_the_others_are_as_without(fields: dict[str, float]) -> None:
    free = SamplingParams(**fields)  # type: ignore[arg-type]
    held = SamplingParams(structured_output=StructuredOutput("regex", "[0-9]{3}"), **fields)  # type: ignore[arg-type]
    mixed, plain = sampler(), sampler()
    for seq_id in range(4):
        mixed.admit(Admitted(seq_id, (1, 2), (), seq_id), held if seq_id % 2 else free)
        plain.admit(Admitted(seq_id, (1, 2), (), seq_id), free)
    said: dict[int, list[int]] = {seq_id: [] for seq_id in range(4)}
    for step in range(4):
        got = mixed.sample(random_logits(4, seed=step), list(range(4)))
        want = plain.sample(random_logits(4, seed=step), list(range(4)))
        assert not got.errors
        for seq_id, token_id in got.token_ids.items():
            said[seq_id].append(token_id)
            assert seq_id % 2 or token_id == want.token_ids[seq_id]
    for seq_id in (1, 3):
        assert bytes(said[seq_id][:3]).isdigit() and said[seq_id][3] == EOS_TOKEN_ID


def test_a_sequence_goes_on_where_a_preemption_left_it() -> None:
    one = sampler()
    one.admit(Admitted(7, (1, 2), tuple(b"12"), 7), DIGITS)
    token_ids = [one.sample(random_logits(1, seed=step), [7]).token_ids[7] for step in range(2)]
    assert chr(token_ids[0]).isdigit() and token_ids[1] == EOS_TOKEN_ID


def test_bias_and_logprobs_go_with_a_form() -> None:
    """The bias moves the choice inside the form, the log-probability stays that of the model."""
    one, logits = sampler(), random_logits(1)
    raw = float(logits.log_softmax(-1)[0, ord("7")])
    params = SamplingParams(
        temperature=0, logit_bias={ord("7"): 100, ord("x"): 100}, logprobs=0, structured_output=DIGITS.structured_output
    )
    one.admit(Admitted(0, (1, 2), (), 0), params)
    got = one.sample(logits, [0])
    assert got.token_ids == {0: ord("7")} and got.logprobs[0].logprob == pytest.approx(raw, abs=1e-5)


def test_an_embedding_larger_than_the_vocabulary_is_masked_to_its_end() -> None:
    wide = VOCAB_SIZE + 45
    forms = GuidedForms(lambda: of_tokens(_Padded()))
    one = Sampler(wide, [EOS_TOKEN_ID], CPU, forms)
    one.admit(Admitted(0, (1, 2), (), 0), DIGITS)
    logits = random_logits(1, wide)
    logits[0, VOCAB_SIZE:] = 50
    assert chr(one.sample(logits, [0]).token_ids[0]).isdigit()


class _Padded(ByteTokenizer):
    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE + 45

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        return ("", b"") if token_id >= VOCAB_SIZE else super().token_text(token_id)


def test_an_answer_that_leaves_its_form_fails_alone() -> None:
    """It cannot by sampling; a fault of the matcher must not reach the neighbours."""
    one = sampler()
    one.admit(Admitted(0, (1, 2), (), 0), DIGITS)
    one.admit(Admitted(1, (1, 2), (), 1), SamplingParams(temperature=0))
    matcher = one._states[0].matcher
    assert matcher is not None
    one.sample(random_logits(2), [0, 1])
    matcher.raw.consume_tokens([ord("x")])  # type: ignore[attr-defined]
    got = one.sample(random_logits(2), [0, 1])
    assert set(got.errors) == {0} and "left its form" in got.errors[0] and set(got.token_ids) == {1}


def test_without_forms_a_form_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        Sampler(VOCAB_SIZE, [], CPU).admit(Admitted(0, (1,), (), 0), DIGITS)
