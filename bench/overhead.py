"""What does a step cost outside the model's forward? Its parts, at 8, 32 and 64 running sequences.

The real engine under the ``continuous`` policy, with metrics on and every answer read piece by piece; the forward is a
stand-in: hashing, which like a forward keeps a core busy and leaves the interpreter lock to others. N requests of 128
tokens run side by side; the steps in which all of them decode are taken apart:

- ``inputs``: from the plan to the tensors that a forward needs (in the executor's thread)
- ``back`` and ``there``: from the end of the executor's work to the engine's task, and from there to the next
- ``apply``, ``schedule``: the scheduler's two calls
- ``before``: news that must be told before the next plan is made (requests with stop texts)
- ``outside_forward``: from the end of one forward to the beginning of the next; all of the above
- ``deltas``: text, stop check, statistics and hand-over to the clients, done while the next forward runs

``no_forward`` is the whole of a step whose forward takes no time, so nothing can hide behind it: all work of the
engine and of the readers. Figures are microseconds, the quartile of the quick and the median of all steps. The sampler
is part of the model's work and is given apart, over a real vocabulary and over a tiny one, which leaves its own part.

    python -m bench.overhead [--tokens 300] [--rounds 3] [--forward-ms 5]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import uvloop

from bench.report import write
from microbatch import SamplingParams
from microbatch.api.metrics import EngineMetrics
from microbatch.core.plan import Admitted, StepPlan, StepResult
from microbatch.core.policies import make_policy
from microbatch.engine.client import AsyncEngine
from microbatch.executor.fake import FakeExecutor, constant
from microbatch.executor.inputs import InputsBuilder
from microbatch.executor.sampling import Sampler
from microbatch.text.bytes_tokenizer import ByteTokenizer
from microbatch.wiring import assemble
from microbatch_kernels.manager import PagedKVManager

SIZES: Final = (8, 32, 64)
CPU: Final = torch.device("cpu")
STOPS: Final = ("\n\n", "###", "User:", "END")
SAMPLING: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
}


@dataclass(slots=True)
class Span:
    """From when to when something ran."""

    began: float
    ended: float


class StandIn(FakeExecutor):
    """Makes the inputs of a packed forward, keeps a core busy for about ``seconds`` and says always the same token."""

    def __init__(self, seconds: float) -> None:
        super().__init__(constant(65), remember=False)
        self.inputs: list[Span] = []
        self._inputs = InputsBuilder(16, CPU)
        self.forwards: list[Span] = []
        self._work = b"." * round(seconds * _hashed_per_second()) if seconds else b""

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        if plan.sequences:
            self._inputs.build(plan.sequences)
        made = time.perf_counter()
        hashlib.sha256(self._work)
        result = super().execute(plan)
        self.inputs.append(Span(began, made))
        self.forwards.append(Span(made, time.perf_counter()))
        return result


def watch(owner: Any, name: str) -> list[Span]:
    """Notes when a method of one object runs, from now on."""
    spans: list[Span] = []
    method: Callable[..., Any] = getattr(owner, name)

    def watched(*args: Any, **options: Any) -> Any:
        span = Span(time.perf_counter(), 0.0)
        try:
            return method(*args, **options)
        finally:
            span.ended = time.perf_counter()
            spans.append(span)

    setattr(owner, name, watched)
    return spans


async def run_steps(size: int, tokens: int, forward_s: float, stop: Sequence[str] = ()) -> dict[str, list[float]]:
    """Seconds of each part, for every step in which ``size`` sequences decode."""
    executor = StandIn(forward_s)
    policy = make_policy("continuous", {"max_num_seqs": size})
    engine = AsyncEngine(
        lambda: assemble(
            executor, PagedKVManager(8192, 16), policy, ByteTokenizer(), model_name="fake", max_model_len=1024
        )
    )
    engine.add_observer(EngineMetrics(engine))
    async with engine:
        core = engine.parts.loop.core
        names = {"schedule": core.scheduler, "apply": core.scheduler, "begin_step": core, "end_step": core}
        spans = {name: watch(owner, name) for name, owner in {**names, "deliver": core}.items()}
        params = SamplingParams(max_tokens=tokens, stop=tuple(stop))
        await asyncio.gather(*[_read(engine, params) for _ in range(size)])
    return take_apart(executor, spans, size * 128 // 2048 + 2, tokens - 2)


async def _read(engine: AsyncEngine, params: SamplingParams) -> None:
    async for _ in engine.stream([65] * 128, params):
        pass


def take_apart(executor: StandIn, spans: dict[str, list[Span]], first: int, last: int) -> dict[str, list[float]]:
    """The parts between forward k and forward k + 1, for k from ``first`` to before ``last``."""
    parts: dict[str, list[float]] = {}
    forwards, inputs = executor.forwards, executor.inputs
    for k in range(first, last):
        end = spans["end_step"][k]
        begin = next(s for s in spans["begin_step"] if s.began >= end.ended)
        apply, schedule = _within(spans["apply"], end), _within(spans["schedule"], begin)
        deltas = [s for s in spans["deliver"] if begin.ended <= s.began < spans["end_step"][k + 1].began]
        for name, seconds in {
            "back": end.began - forwards[k].ended,
            "apply": apply,
            "before": end.ended - end.began - apply,
            "schedule": schedule,
            "there": inputs[k + 1].began - begin.ended,
            "inputs": inputs[k + 1].ended - inputs[k + 1].began,
            "outside_forward": forwards[k + 1].began - forwards[k].ended,
            "deltas": sum(s.ended - s.began for s in deltas),
            "step": forwards[k + 1].began - forwards[k].began,
        }.items():
            parts.setdefault(name, []).append(seconds)
    return parts


def _within(spans: Sequence[Span], outer: Span) -> float:
    return sum(s.ended - s.began for s in spans if outer.began <= s.began and s.ended <= outer.ended)


def time_sampler(size: int, vocab_size: int, fields: dict[str, Any], rounds: int) -> list[float]:
    """Seconds of each call for ``size`` rows."""
    sampler = Sampler(vocab_size, [2], CPU)
    params = SamplingParams(**fields)
    for seq_id in range(size):
        sampler.admit(Admitted(seq_id, (5, 6), (), seq_id), params)
    # Falling as in Zipf's law, in another order in each row: most of the mass lies in a few tokens, as with real ones.
    falling = -1.5 * torch.arange(1, vocab_size + 1).log()
    logits = torch.stack([falling[torch.randperm(vocab_size)] for _ in range(size)])
    seconds = []
    for _ in range(rounds):
        copy = logits.clone()
        began = time.perf_counter()
        sampler.sample(copy, list(range(size)))
        seconds.append(time.perf_counter() - began)
    return seconds


def summary(seconds: Sequence[float]) -> dict[str, int]:
    """Quick quartile and median in microseconds."""
    return {
        "quartile": round(statistics.quantiles(seconds, n=4)[0] * 1e6),
        "median": round(statistics.median(seconds) * 1e6),
    }


def measure(size: int, tokens: int, rounds: int, forward_s: float) -> dict[str, Any]:
    """Everything for one number of sequences."""
    kept: dict[str, Any] = {"torch_threads": torch.get_num_threads()}
    for name, seconds, stop in (("plain", forward_s, ()), ("with_stop_texts", forward_s, STOPS), ("bare", 0.0, ())):
        runs = [uvloop.run(run_steps(size, tokens, seconds, stop)) for _ in range(rounds)]  # the server's event loop
        parts = {part: [s for run in runs for s in run[part]] for part in runs[0]}
        kept[name] = {part: summary(values) for part, values in parts.items() if part != "step"}
        if not seconds:
            kept["no_forward"] = summary(parts["step"])
            del kept[name]
    for vocabulary, vocab_size in (("sampler", 49152), ("sampler_tiny_vocabulary", 64)):
        kept[vocabulary] = {
            name: summary(time_sampler(size, vocab_size, fields, 20 * rounds)) for name, fields in SAMPLING.items()
        }
    return kept


def _hashed_per_second() -> float:
    data = b"." * 2**20
    began = time.perf_counter()
    hashlib.sha256(data)
    return len(data) / (time.perf_counter() - began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="engine overhead")
    parser.add_argument("--tokens", type=int, default=300, help="of each answer, which is the number of steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forward-ms", type=float, default=5.0, help="of the stand-in")
    arguments = parser.parse_args()
    results = {}
    for size in SIZES:
        results[str(size)] = measure(size, arguments.tokens, arguments.rounds, arguments.forward_ms / 1e3)
        print(size, results[str(size)])
    write("overhead", (__doc__ or "").partition("\n")[0], results)
