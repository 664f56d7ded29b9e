"""A stream joined is the plain answer: every form of answer, however the tokens are cut into deltas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from hypothesis import given, strategies as st

from microbatch.api.openai.frames import Frame
from microbatch.api.openai.render import ChatRenderer, CompletionRenderer, Envelope, Renderer
from microbatch.core.plan import TokenLogprobs
from microbatch.core.request import FinishReason, SamplingParams
from microbatch.engine.outputs import Choice, ChoiceDelta, RequestOutput, Timings, Usage
from microbatch.engine.stream import RequestStream
from microbatch.text.bytes_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
USAGE = Usage(2, 3, 1)
ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@st.composite
def streamed_choices(draw: st.DrawFn, logprobs: int | None) -> tuple[Choice, list[ChoiceDelta]]:
    """A choice, and the same cut into deltas at any places: some without text or tokens, some of broken characters."""
    index = draw(st.integers(0, 1))
    data = draw(st.one_of(st.text(max_size=12).map(lambda text: text.encode()), st.binary(max_size=12)))
    reason = draw(st.sampled_from(ENDS))
    detokenizer = TOKENIZER.detokenizer()
    pieces = [(token_id, detokenizer.push(token_id)) for token_id in data]
    entries = [
        TokenLogprobs(-0.25 * i, tuple((65 + j, -1.0 - j) for j in range(logprobs or 0))) for i in range(len(data))
    ]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    deltas: list[ChoiceDelta] = []
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        text, last = "".join(text for _, text in pieces[begin:end]), len(deltas) == len(cuts)
        kept = tuple(entries[begin:end]) or None if logprobs is not None else None
        deltas.append(
            ChoiceDelta(
                index,
                text + detokenizer.finish() if last else text,
                tuple(data[begin:end]),
                kept,
                reason if last else None,
            )
        )
    whole = "".join(delta.text for delta in deltas)
    return Choice(index, whole, tuple(data), reason, tuple(entries) if logprobs is not None else None), deltas


def joined(renderer: Renderer, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
    """What a client that joins the chunks has."""
    chunks = [json.loads(msgspec.json.encode(chunk)) for delta in deltas for chunk in renderer.chunks(0, delta)]
    have: dict[str, Any] = {"text": "", "logprobs": {}, "finish_reason": None}
    for (choice,) in [chunk["choices"] for chunk in chunks]:
        assert have["finish_reason"] is None, "something after the end"
        have["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for name, values in (choice["logprobs"] or {}).items():
            have["logprobs"][name] = have["logprobs"].get(name, []) + values if values is not None else None
        have["finish_reason"] = choice["finish_reason"]
    return have


def plain(renderer: Renderer, choice: Choice) -> dict[str, Any]:
    """What a client has that asked for the whole answer."""
    output = RequestOutput("r", (choice,), USAGE, Timings(None, None, None))
    (answer,) = json.loads(msgspec.json.encode(renderer.body([output])))["choices"]
    text = answer["text"] if "text" in answer else answer["message"]["content"]
    return {"text": text, "logprobs": answer["logprobs"] or {}, "finish_reason": answer["finish_reason"]}


@given(st.data(), st.sampled_from([None, 0, 2]), st.booleans(), st.booleans())
def test_completions(data: st.DataObject, logprobs: int | None, echo: bool, usage: bool) -> None:
    choice, deltas = data.draw(streamed_choices(logprobs))
    params = SamplingParams(n=2, logprobs=logprobs)

    def make() -> CompletionRenderer:
        envelope = Envelope("cmpl", "text_completion", 'a "model"', usage)
        renderer = CompletionRenderer(envelope, TOKENIZER, params, ["said: "] if echo else None)
        renderer.begin([cast(RequestStream, SimpleNamespace(prompt_logprobs=None))])
        return renderer

    assert joined(make(), deltas) == plain(make(), choice)


@given(st.data(), st.sampled_from([None, 0, 2]), st.booleans())
def test_chats(data: st.DataObject, logprobs: int | None, usage: bool) -> None:
    choice, deltas = data.draw(streamed_choices(logprobs))

    def make() -> ChatRenderer:
        envelope = Envelope("chatcmpl", "chat.completion", "m", usage)
        return ChatRenderer(envelope, TOKENIZER, SamplingParams(n=2, logprobs=logprobs))

    assert joined(make(), deltas) == plain(make(), choice)


@given(st.text(), st.text(max_size=5))
def test_a_filled_frame_is_the_rendered_chunk(text: str, model: str) -> None:
    envelope = Envelope("cmpl", "text_completion", model)

    def make(text: str) -> msgspec.Raw:
        return envelope.chunk({"index": 0, "text": text, "logprobs": None, "finish_reason": None})

    assert bytes(Frame(make).fill(text)) == bytes(make(text))
