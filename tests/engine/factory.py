"""Engines over a fake executor and a byte tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from microbatch.core.plan import SequenceStep, StepPlan
from microbatch.core.policies import make_policy
from microbatch.engine.client import AsyncEngine
from microbatch.executor.fake import FakeExecutor, NextToken
from microbatch.text.bytes_tokenizer import ByteTokenizer
from microbatch.wiring import assemble
from microbatch_kernels.manager import PagedKVManager


def script(text: str) -> NextToken:
    """Says ``text`` after any prompt that ends with '>', one token a letter, then ends."""
    data: list[int] = [*text.encode(), 257]

    def next_token(context: Sequence[int], step: SequenceStep) -> int:
        said = len(context) - bytes(context).index(b">") - 1
        return data[min(said, len(data) - 1)]

    return next_token


def make_engine(
    executor: FakeExecutor | None = None,
    *,
    num_blocks: int = 64,
    policy: str = "window",
    policy_args: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncEngine:
    executor = executor or FakeExecutor()
    arguments = (
        {"max_batch_size": 4, "window_ms": 1} if policy == "window" and policy_args is None else policy_args or {}
    )
    settings: dict[str, Any] = {"model_name": "fake", "max_model_len": 256, **options}
    return AsyncEngine(
        lambda: assemble(
            executor, PagedKVManager(num_blocks, 16), make_policy(policy, arguments), ByteTokenizer(), **settings
        )
    )


class Gate:
    """Holds a fake executor's steps until it is opened; ``plans`` are those that have begun."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.entered = threading.Semaphore(0)

    def latency(self, plan: StepPlan) -> float:
        self.entered.release()
        self._open.wait(20)
        return 0.0

    def open(self) -> None:
        self._open.set()
