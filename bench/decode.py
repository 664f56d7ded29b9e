"""How fast are decode steps? Ours, transformers' static ``generate`` and its ``generate_batch``, and the floor.

So many sequences of 256 tokens each, then decode steps with all of them running; the embedded model in float32. Our
step is the whole one: schedule, forward over the store, sampling, apply. The contenders take turns, several rounds;
figures are medians of all steps. ``generate_batch`` gives no steps: (time of 97 tokens - time of 1) / 96.

    python -m bench.decode [--rows 1 8 32] [--rounds 3] [--weights float32] [--no-batch]
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from microbatch.startup import prefer_passive_waiting

prefer_passive_waiting()

import torch  # noqa: E402
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList  # noqa: E402

from bench.floor import Floor  # noqa: E402
from bench.report import median, write  # noqa: E402
from microbatch.core.policies import ContinuousPolicy  # noqa: E402
from microbatch.core.request import Request, SamplingParams  # noqa: E402
from microbatch.core.scheduler import Scheduler  # noqa: E402
from microbatch.executor.cpu_kernels import WEIGHT_DTYPES, CpuKernels  # noqa: E402
from microbatch.executor.embedded import default_home  # noqa: E402
from microbatch.executor.loading import LoadedModel, ModelSpec, load_model  # noqa: E402
from microbatch.executor.paged import PagedExecutor  # noqa: E402
from microbatch.executor.profiling import StepShape  # noqa: E402
from microbatch.executor.serving import put_over_store  # noqa: E402
from microbatch_kernels.manager import PagedKVManager  # noqa: E402

CONTEXT, STEPS, BATCH_STEPS = 256, 32, 96
Prompts = list[list[int]]


class Clock(StoppingCriteria):
    """Notes when each token of ``generate`` was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def config(tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=[])


def static_steps(model: Any, prompts: Prompts) -> list[float]:
    """Seconds of each decode step of one ``generate`` of equal lengths."""
    clock, ids = Clock(), torch.tensor(prompts)
    criteria = StoppingCriteriaList([clock])
    model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config(STEPS + 1), stopping_criteria=criteria
    )
    return [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]


def batch_steps(model: Any, prompts: Prompts) -> list[float]:
    """Mean seconds of a step of transformers' own continuous batching, whose start takes seconds and is left out."""
    taken = []
    for tokens in (1, BATCH_STEPS + 1):
        started = time.perf_counter()
        outputs = model.generate_batch(prompts, generation_config=config(tokens), progress_bar=False)
        taken.append(time.perf_counter() - started)
        assert [len(out.generated_tokens) for out in outputs.values()] == [tokens] * len(prompts)
    return [(taken[1] - taken[0]) / BATCH_STEPS]


class Ours:
    """Scheduler and executor as the server has them, without its event loop."""

    def __init__(self, loaded: LoadedModel, weights: str) -> None:
        kernels = CpuKernels(default_home() / "kernels", WEIGHT_DTYPES[weights])
        step = StepShape(64, 2048, 8192, packed=True)
        self.model, _ = put_over_store(loaded, block_size=16, num_blocks=4096, num_tokens=0, step=step, kernels=kernels)
        self._executor = PagedExecutor(self.model, loaded.eos_token_ids)

    def steps(self, prompts: Prompts) -> list[float]:
        """Seconds of each step in which every sequence gets a token."""
        kv = PagedKVManager(self.model.store.num_blocks, 16, prefix_cache=False)
        scheduler = Scheduler(kv, ContinuousPolicy(max_num_seqs=len(prompts)), max_num_batched_tokens=2048)
        params = SamplingParams(max_tokens=STEPS + 2, temperature=0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            request = Request(str(index), tuple(prompt), params, arrival_time=0.0)
            scheduler.add(request, seed=0, max_total_tokens=CONTEXT + STEPS + 2)
        taken = []
        while not scheduler.idle:
            started = time.perf_counter()
            plan = scheduler.schedule(0.0)
            assert plan is not None
            scheduler.apply(self._executor.execute(plan), 0.0)
            if len(plan.sequences) == plan.num_tokens == len(prompts):
                taken.append(time.perf_counter() - started)
        return taken


def floor_of(rows: int, model: Any, bytes_per_token: int, floor: Floor) -> float:
    """Seconds: every weight of a product and all K/V read once, two sums a weight and row."""
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2)
    return floor.seconds(4 * weights + rows * CONTEXT * bytes_per_token, 2 * weights * rows)


def main(rows: list[int], rounds: int, weights: str, batch: bool) -> dict[str, Any]:
    """All counts of rows; returns what is kept."""
    loaded = load_model(ModelSpec(device="cpu", dtype="float32"))
    theirs = copy.deepcopy(loaded.model)
    theirs.generation_config = GenerationConfig()
    ours = Ours(loaded, weights)
    contenders: dict[str, Callable[[Prompts], list[float]]] = {
        "ours": ours.steps,
        "static": lambda prompts: static_steps(theirs, prompts),
    }
    if batch:
        contenders["generate_batch"] = lambda prompts: batch_steps(theirs, prompts)
    floor, results = Floor(0, 0), {}
    for run in contenders.values():  # what is made at the first call
        run([[5] * CONTEXT])
    for count in rows:
        floor = floor.best(Floor.measure())
        rnd = random.Random(count)
        prompts = [[rnd.randrange(1000, 40_000) for _ in range(CONTEXT)] for _ in range(count)]
        seen: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, run in contenders.items():
                seen[name] += run(prompts)
        shortest = floor_of(count, theirs, ours.model.store.bytes_per_token, floor)
        results[count] = summary(seen, shortest)
        print(count, results[count], flush=True)
    return {"floor": floor._asdict(), "weights": weights, "context": CONTEXT, "rows": results}


def summary(seen: dict[str, list[float]], shortest: float) -> dict[str, Any]:
    """Medians, what they are to ours, and our share of the floor."""
    ours = statistics.median(seen["ours"])
    return {
        "step_ms": {name: median((1e3 * s for s in steps), 2) for name, steps in seen.items()},
        "ours_to": {name: round(statistics.median(s) / ours, 2) for name, s in seen.items() if name != "ours"},
        "floor_ms": round(1e3 * shortest, 2),
        "share_of_floor": round(shortest / ours, 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights", choices=sorted(WEIGHT_DTYPES), default="float32")
    parser.add_argument("--no-batch", action="store_true", help="leave generate_batch out: it is slow")
    chosen = parser.parse_args()
    results = main(chosen.rows, chosen.rounds, chosen.weights, not chosen.no_batch)
    suffix = "" if chosen.weights == "float32" else f"_{chosen.weights}"
    write(f"decode{suffix}", (__doc__ or "").splitlines()[0], results)
