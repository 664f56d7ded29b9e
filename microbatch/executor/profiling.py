"""One step as large as the settings allow, run before the store is made, to see what memory a step takes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Final

from microbatch.core.plan import Admitted, SequenceStep, StepPlan
from microbatch.core.ports import Executor
from microbatch.core.request import SamplingParams
from microbatch.errors import OutOfMemoryError, SetupError
from microbatch.executor.device_memory import DeviceMemory
from microbatch.executor.generate import GenerateExecutor
from microbatch.executor.paged import PagedExecutor
from microbatch.executor.run import PagedModel

logger = logging.getLogger(__name__)

#: A step that is smaller than this is not worth serving with.
_LEAST_TOKENS: Final = 16
#: Work that the profiling step may be on a CPU: about a quarter of a second on two cores. The rest is extrapolated.
_CPU_FLOPS: Final = 3.5e10


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step: ``num_tokens`` new tokens over ``num_seqs`` sequences, packed, or padded as one batch of
    ``generate``. ``max_len``: no sequence is longer."""

    num_seqs: int
    num_tokens: int
    max_len: int
    packed: bool

    @property
    def setting(self) -> str:
        """The setting that makes it smaller."""
        return "--max-num-batched-tokens" if self.packed else "--max-batch-size"

    @property
    def lengths(self) -> list[int]:
        """New tokens of each sequence: as even as they can be."""
        rows = max(1, min(self.num_seqs, self.num_tokens))
        each, more = divmod(self.num_tokens, rows)
        return [min(self.max_len, each + (row < more)) for row in range(rows)]

    def cut(self, num_tokens: int) -> StepShape:
        """The same in small: fewer sequences in proportion, at most ``num_tokens`` tokens."""
        if num_tokens >= self.num_tokens:
            return self
        rows = max(1, -(-self.num_seqs * num_tokens // self.num_tokens))
        return replace(self, num_seqs=rows, num_tokens=num_tokens)

    def __str__(self) -> str:
        lengths = self.lengths
        return f"a step of {sum(lengths)} tokens in {len(lengths)} sequence{'s' if len(lengths) > 1 else ''}"


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What the largest step takes beside weights and K/V. ``how``: measured, extrapolated or estimated."""

    step: StepShape
    activations: int
    how: str


def profile_step(model: PagedModel, step: StepShape, memory: DeviceMemory) -> StepProfile:
    """Run the largest step over ``model``, whose store is a scratch one of a single block.

    What does not fit is halved, with a warning: the result tells the step that was run. ``SetupError`` when nothing
    fits. On a CPU a part is run and the rest is extrapolated, so that the start stays quick.
    """
    while True:
        parts = _parts(model, step)
        memory.reset_peak()
        try:
            for part in parts:
                _run(model, part)
        except OutOfMemoryError as error:
            step = _halved(step, error)
            continue
        peak = memory.peak()
        if peak is None:
            return StepProfile(step, estimate(model, step), "estimated")
        ratio = sum(step.lengths) / sum(parts[0].lengths)
        return StepProfile(step, int(peak * ratio), "measured" if ratio == 1 else "extrapolated")


def estimate(model: PagedModel, step: StepShape) -> int:
    """Bytes of activations by the shapes of the model: a few vectors of each width a token, a few rows of logits."""
    hidden, inner, _ = _widths(model)
    itemsize = model.store.layers[0].dtype.itemsize
    lengths = step.lengths
    return sum(lengths) * (8 * hidden + 4 * inner) * itemsize + 6 * len(lengths) * model.vocab_size * 4


def flops_a_token(model: PagedModel) -> float:
    """About what the linear layers compute for one token; by the config, for weights may have been packed away."""
    hidden, inner, layers = _widths(model)
    return 2.0 * (layers * (4 * hidden**2 + 3 * hidden * inner) + hidden * model.vocab_size)


def _widths(model: PagedModel) -> tuple[int, int, int]:
    """Width of the hidden states, of the inner layer, and the number of layers."""
    config: Any = model.model.config.get_text_config()
    hidden = model.model.get_input_embeddings().weight.shape[1]
    return hidden, getattr(config, "intermediate_size", None) or 4 * hidden, len(model.store.layers)


def _halved(step: StepShape, error: OutOfMemoryError) -> StepShape:
    smaller = step.cut(sum(step.lengths) // 2)
    if smaller.num_tokens < _LEAST_TOKENS:
        raise SetupError(
            f"{step} does not fit beside the weights ({error}): use a smaller model, --quantization int8 or int4, or"
            " free memory on the device"
        )
    logger.warning("%s does not fit (%s): trying %s; lower %s", step, error, smaller, step.setting)
    return smaller


def _parts(model: PagedModel, step: StepShape) -> list[StepShape]:
    """What to run: on a CPU a part that is quick; elsewhere all of it and, where a prompt may have a step for itself,
    that too, for its attention takes more."""
    if model.device.type == "cpu":
        return [step.cut(max(_LEAST_TOKENS, int(_CPU_FLOPS / flops_a_token(model))))]
    return [step, replace(step, num_seqs=1)] if step.packed else [step]


def _run(model: PagedModel, step: StepShape) -> None:
    """Through the executor that will serve, sampling included. All tokens go to the same block: what it holds does not
    matter here."""
    executor: Executor = PagedExecutor(model) if step.packed else GenerateExecutor(model)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    steps = []
    for row, length in enumerate(step.lengths):
        tokens = tuple((row + 7 * i) % model.vocab_size for i in range(length))
        block_ids = (1,) * -(-length // model.store.block_size)
        steps.append(SequenceStep(row, tokens, 0, block_ids, True, params))
    admitted = tuple(Admitted(s.seq_id, s.token_ids, (), seed=s.seq_id) for s in steps)
    try:
        executor.execute(StepPlan(0, tuple(steps), admitted, (), not step.packed, len(steps)))
    finally:
        executor.close()
