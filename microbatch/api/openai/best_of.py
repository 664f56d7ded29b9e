"""``best_of``: more answers than are given back; the likeliest are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from microbatch.core.request import SamplingParams
from microbatch.engine.outputs import Choice, RequestOutput
from microbatch.errors import InvalidRequestError

MAX_BEST_OF: Final = 20


def check_best_of(best_of: int | None, n: int, *, stream: bool) -> None:
    """``InvalidRequestError`` unless it is from ``n`` to 20. In a stream there is nothing to choose from."""
    if best_of is None:
        return
    if best_of < n or best_of > max(n, MAX_BEST_OF):
        raise InvalidRequestError(
            f"best_of must be from n ({n}) to {max(n, MAX_BEST_OF)}, got {best_of}", param="best_of"
        )
    if best_of > n and stream:
        raise InvalidRequestError("best_of above n cannot be streamed", param="best_of")


def widen(params: SamplingParams, best_of: int | None) -> SamplingParams:
    """The parameters that make so many answers, with what it takes to choose."""
    if best_of is None or best_of <= params.n:
        return params
    return replace(params, n=best_of, logprobs=params.logprobs or 0)


def keep_best(output: RequestOutput, n: int) -> RequestOutput:
    """Only the ``n`` answers whose tokens have the highest mean log-probability, the best first. The usage stays that
    of all. Of equals the earlier comes first; an answer without any token is the last."""
    if len(output.choices) <= n:
        return output
    best = sorted(output.choices, key=_mean_logprob, reverse=True)[:n]
    return replace(output, choices=tuple(replace(choice, index=index) for index, choice in enumerate(best)))


def _mean_logprob(choice: Choice) -> float:
    entries = choice.logprobs or ()
    return sum(entry.logprob for entry in entries) / len(entries) if entries else float("-inf")
