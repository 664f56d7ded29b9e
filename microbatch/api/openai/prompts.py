"""The four forms of a completions prompt: a text, texts, token ids, lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from microbatch.api.ports import ServingEngine
from microbatch.errors import InvalidRequestError

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Limits that prompts are checked against."""

    max_prompts: int
    vocab_size: int
    max_model_len: int


def read_prompts(prompt: str | Sequence[str | int | list[int]], rules: PromptRules) -> list[Prompt]:
    """The prompts of a request, each a text or token ids. Raises ``InvalidRequestError``.

    Token ids too many for the context are not looked at: the engine refuses them by their number.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise _error("prompt is empty")
    kind = type(prompt[0])
    if kind is int and len(prompt) >= rules.max_model_len:
        return [prompt]  # type: ignore[list-item]
    if kind is not int and len(prompt) > rules.max_prompts:
        raise _error(f"prompt has {len(prompt)} prompts, one request takes at most {rules.max_prompts}")
    if set(map(type, prompt)) != {kind}:
        raise _error(
            "prompt must be a text, a list of texts, a list of token ids or a list of such lists, not a mixture"
        )
    prompts: list[Prompt] = [prompt] if kind is int else list(prompt)  # type: ignore[arg-type, list-item]
    for index, item in enumerate(prompts):
        if not isinstance(item, str):
            _check_ids(item, "prompt" if kind is int else f"prompt[{index}]", rules)
    return prompts


async def encode_prompts(engine: ServingEngine, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of every prompt. Raises ``InvalidRequestError`` for one that has none."""
    encoded = []
    for index, prompt in enumerate(prompts):
        ids = await engine.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise _error(f"prompt[{index}] has no tokens" if len(prompts) > 1 else "prompt has no tokens")
        encoded.append(ids)
    return encoded


def _check_ids(ids: list[int], where: str, rules: PromptRules) -> None:
    if not ids:
        raise _error(f"{where} is empty")
    if len(ids) >= rules.max_model_len or (min(ids) >= 0 and max(ids) < rules.vocab_size):
        return
    index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < rules.vocab_size)
    raise _error(f"{where}[{index}] is {ids[index]}: token ids are from 0 to {rules.vocab_size - 1}")


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="prompt")
