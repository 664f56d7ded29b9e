"""Memory that runs out anywhere in a step: the step gets smaller, the answers stay the same, nobody is lost."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from microbatch import Engine, SamplingParams
from microbatch.errors import OutOfMemoryError
from microbatch.executor.faults import is_out_of_memory, memory_faults
from microbatch.executor.penalties import Adjustment
from microbatch.executor.sampling import Sampler
from tests.executor.tiny_models import save_llama

PROMPTS = [[5 + (i * 7 + k) % 200 for i in range(length)] for k, length in enumerate([1, 30, 3, 17, 8, 40])]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.9, seed=7, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0, repetition_penalty=1.3, ignore_eos=True),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "continuous": {"policy": "continuous", "max_num_seqs": 6},
    "window": {"policy": "window", "max_batch_size": 6, "window_ms": 20},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    model = save_llama(place)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.25)
    model.save_pretrained(place)
    return place


@asynccontextmanager
async def engine_for(folder: Path, policy: str) -> AsyncIterator[Engine]:
    async with Engine(str(folder), kv_blocks=60, block_size=4, prefix_cache=False, **SETTINGS[policy]) as engine:
        yield engine


async def answers(engine: Engine) -> list[tuple[int, ...]]:
    jobs = [engine.generate(prompt, PARAMS[k % 3]) for k, prompt in enumerate(PROMPTS)]
    outputs = await asyncio.gather(*jobs)
    statistics = engine.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks
    return [output.token_ids for output in outputs]


def torch_cpu_error() -> RuntimeError:
    """What torch itself raises on a CPU."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


class Faults:
    """Replaces a function by one that runs out of memory when ``too_much`` says so of its arguments."""

    def __init__(self, owner: Any, name: str, too_much: Callable[..., bool], error: Exception) -> None:
        self.count = 0
        original = getattr(owner, name)

        def sometimes(*args: Any, **kwargs: Any) -> Any:
            if too_much(*args, **kwargs):
                self.count += 1
                raise type(error)(*error.args)
            return original(*args, **kwargs)

        self.patch = (owner, name, sometimes)


def every(number: int) -> Callable[..., bool]:
    """True at each ``number``-th call."""
    calls: Iterator[int] = iter(range(1, 10**6))
    return lambda *args, **kwargs: next(calls) % number == 0


def forward_of(limit: int) -> Callable[..., bool]:
    return lambda model, *args, **kwargs: bool(kwargs["input_ids"].numel() > limit)


#: Where memory runs out: in the forward of more than so many tokens, in sampling, as a sequence comes in.
PLACES: dict[str, Callable[[], Faults]] = {
    "forward": lambda: Faults(
        LlamaForCausalLM, "forward", forward_of(41), torch.OutOfMemoryError("CUDA out of memory")
    ),
    "forward on a CPU": lambda: Faults(LlamaForCausalLM, "forward", forward_of(45), torch_cpu_error()),
    "sampling": lambda: Faults(Sampler, "sample", lambda sampler, logits, ids: len(ids) > 2, torch_cpu_error()),
    "entrance": lambda: Faults(Adjustment, "__init__", every(4), MemoryError("cannot allocate")),
}


@pytest.mark.anyio
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", SETTINGS)
async def test_every_answer_is_the_one_without_faults(
    policy: str, place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_for(folder, policy) as engine:
        right = await answers(engine)
        assert [len(a) for a in right] == [12, 5, 20] * 2
        faults = PLACES[place]()
        monkeypatch.setattr(*faults.patch)
        assert await answers(engine) == right
        assert faults.count > 0
        monkeypatch.undo()
        assert await answers(engine) == right


@pytest.mark.anyio
async def test_the_last_row_of_a_batch_is_tried_without_those_that_have_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that have ended are computed on; with them a decode of the one that is left may not fit."""
    async with engine_for(folder, "window") as engine:
        right = await answers(engine)
        late = iter(range(1000))
        faults = Faults(
            LlamaForCausalLM,
            "forward",
            lambda *args, **kwargs: next(late) > 14 and len(kwargs["input_ids"]) > 2,
            torch_cpu_error(),
        )
        monkeypatch.setattr(*faults.patch)
        jobs = [engine.generate(PROMPTS[k], PARAMS[k]) for k in range(3)]
        assert [output.token_ids for output in await asyncio.gather(*jobs)] == right[:3]
        assert faults.count == 1


@pytest.mark.anyio
@pytest.mark.parametrize("policy", SETTINGS)
async def test_what_does_not_fit_alone_fails_alone(policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_for(folder, policy) as engine:
        right = await answers(engine)
        too_long = Faults(LlamaForCausalLM, "forward", lambda *args, **kwargs: True, torch_cpu_error())
        monkeypatch.setattr(*too_long.patch)
        failed = await asyncio.gather(*(engine.generate(p, PARAMS[0]) for p in PROMPTS), return_exceptions=True)
        assert {type(f) for f in failed} == {OutOfMemoryError}
        monkeypatch.undo()
        assert await answers(engine) == right


def test_all_forms_are_known() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(torch_cpu_error()) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))


def test_tensors_of_the_failed_step_are_gone_when_the_error_arrives() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("no memory")

    gc.disable()
    try:
        with pytest.raises(OutOfMemoryError, match="out of memory in a step of 3 tokens: no memory") as caught:
            with memory_faults("a step of 3 tokens", torch.device("cpu")):
                step()
        assert caught.value.__context__ is not None and held[0]() is None
    finally:
        gc.enable()


def test_other_faults_pass_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        with memory_faults("a step", torch.device("cpu")):
            _ = 1 / 0
