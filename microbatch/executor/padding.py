"""The padded layout of a batch for ``model.generate``: which column of which row is which token. Ints only.

Columns of a row, with W = the widest cached prefix of the batch and S = the most new tokens of a row:

    [ cached prefix of the row | unused to W | padding | new tokens of the row ]   W + S columns

The mask is 1 on the prefix and the new tokens, so positions (its running sum) are right in every row. Each decode step
adds one column to every row; only rows that are still live have a token in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from microbatch.core.plan import SequenceStep
from microbatch_kernels.metadata import slot_mapping


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """The first forward of a batch. Lists are row by row."""

    input_ids: list[list[int]]
    attention_mask: list[list[int]]
    packed: list[int] | None
    prefix_columns: int

    @classmethod
    def build(cls, steps: Sequence[SequenceStep], pad_token_id: int) -> PaddedBatch:
        """``packed`` lists the valid positions of ``input_ids`` flattened, in row order; None when nothing is
        padded."""
        width = max(s.start for s in steps)
        length = max(len(s.token_ids) for s in steps)
        input_ids: list[list[int]] = []
        mask: list[list[int]] = []
        packed: list[int] = []
        for row, step in enumerate(steps):
            pads = length - len(step.token_ids)
            input_ids.append([pad_token_id] * pads + list(step.token_ids))
            mask.append([1] * step.start + [0] * (width - step.start + pads) + [1] * len(step.token_ids))
            packed += range(row * length + pads, (row + 1) * length)
        full = len(packed) == len(steps) * length
        return cls(input_ids, mask, None if full else packed, width)

    def slots(self, steps: Sequence[SequenceStep], block_size: int) -> list[list[int]]:
        """The slot of every column of the mask, 0 for padding; for the dense gather."""
        rows = []
        for step, mask in zip(steps, self.attention_mask, strict=True):
            slots = iter(slot_mapping(step.block_ids, 0, step.start + len(step.token_ids), block_size))
            rows.append([next(slots) if m else 0 for m in mask])
        return rows
