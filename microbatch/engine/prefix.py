"""A declared system prompt: its K/V is computed once, before the first request, and pinned."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

from microbatch.core.request import SamplingParams
from microbatch.errors import ContextLengthError, SetupError

if TYPE_CHECKING:
    from microbatch.engine.client import AsyncEngine


class SharedPrefix:
    """Finds the tokens that every conversation with the system prompt begins with, runs them once and pins their
    blocks."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def declare(self, system_prompt: str) -> tuple[int, ...]:
        """Returns the shared tokens. Only their full blocks are kept; a shorter prefix is computed each time."""
        token_ids = self.token_ids(system_prompt)
        parts = self._engine.parts
        kv = parts.loop.core.scheduler.kv
        if len(token_ids) < kv.block_size:
            return token_ids
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        try:
            await self._engine.generate(token_ids, params, pin_prompt=True)
        except ContextLengthError as error:
            raise SetupError(f"the system prompt is too long: {error.message}") from None
        return token_ids

    def token_ids(self, system_prompt: str) -> tuple[int, ...]:
        """What two conversations that differ from their first user letter on have in common."""
        tokenizer = self._engine.tokenizer
        system: dict[str, object] = {"role": "system", "content": system_prompt}
        a, b = (
            tokenizer.apply_chat_template([system, {"role": "user", "content": letter}]) for letter in ("a", "\u4e00")
        )
        return tuple(a[: _common(a, b)])


def _common(a: SequenceABC[int], b: SequenceABC[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length
