"""What a packed forward is given: the tokens of a plan end to end, as tensors on the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from microbatch.core.plan import SequenceStep
from microbatch_kernels.attention_inputs import AttentionInputs, upload
from microbatch_kernels.block_rows import BlockRows


@dataclass(slots=True)
class PackedInputs:
    """A step of T tokens: ``token_ids`` and ``positions`` int64 ``[1, T]``; ``kept`` the index of each token that
    another one is sampled after, at least one; ``seq_ids`` whose they are, none when nothing is sampled."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    seq_ids: list[int]
    attention: AttentionInputs


class InputsBuilder:
    """Makes the inputs of one step after the other. Those of a step are good until the next call.

    Most steps are decodes of the same number of sequences: for them the tensors of the step before are written over,
    because making a tensor costs more than filling it.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = BlockRows()
        self._decode: _DecodeBuffers | None = None

    def build(self, steps: Sequence[SequenceStep]) -> PackedInputs:
        """From the sequences of a plan, in their order; at least one."""
        seq_ids, token_ids, starts, tables, samples, _ = zip(*steps)
        tokens = list(chain.from_iterable(token_ids))
        if len(tokens) == len(steps) and all(samples) and self._device.type == "cpu":
            return self._build_decode(seq_ids, tokens, starts, tables)
        positions = [p for ids, start in zip(token_ids, starts) for p in range(start, start + len(ids))]
        rows = list(zip(tables, starts, map(len, token_ids)))
        ends = [end - 1 for end, samples in zip(_running_sums(token_ids), samples) if samples]
        return PackedInputs(
            upload(tokens, self._device)[None],
            upload(positions, self._device)[None],
            upload(ends or [0], self._device),
            [s.seq_id for s in steps if s.samples],
            AttentionInputs.build(rows, self._block_size, self._device, self._tables),
        )

    def _build_decode(
        self,
        seq_ids: tuple[int, ...],
        tokens: list[int],
        starts: tuple[int, ...],
        tables: tuple[tuple[int, ...], ...],
    ) -> PackedInputs:
        size = self._block_size
        slots = [ids[start // size] * size + start % size for ids, start in zip(tables, starts)]
        lens = [start + 1 for start in starts]
        buffers = self._decode
        if buffers is None or buffers.num_rows != len(tokens):
            buffers = self._decode = _DecodeBuffers(len(tokens))
        buffers.fill(tokens, starts, slots, lens, self._tables.fill(tables, -(-max(lens) // size)))
        buffers.inputs.seq_ids = list(seq_ids)
        return buffers.inputs


class _DecodeBuffers:
    """The inputs of a step in which each of ``num_rows`` sequences has one new token and samples, in memory of the
    host."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._ints = array("q", bytes(4 * 8 * num_rows))
        tokens, positions, slots, lens = torch.frombuffer(self._ints, dtype=torch.int64).view(4, num_rows)
        each = torch.arange(num_rows + 1)
        attention = AttentionInputs(
            (1,) * num_rows, (), torch.empty(num_rows, 0, dtype=torch.int64), slots, lens, each, each[:num_rows]
        )
        self.inputs = PackedInputs(tokens[None], positions[None], each[:num_rows], [], attention)

    def fill(
        self,
        tokens: Sequence[int],
        starts: Sequence[int],
        slots: Sequence[int],
        lens: Sequence[int],
        tables: torch.Tensor,
    ) -> None:
        """Write a step over the last one."""
        self._ints[:] = array("q", chain(tokens, starts, slots, lens))
        attention = self.inputs.attention
        attention.context_lens = tuple(lens)
        attention.block_tables = tables
        attention.masks.clear()
        attention.tile_lists.clear()


def _running_sums(token_ids: Sequence[Sequence[int]]) -> list[int]:
    ends, end = [], 0
    for ids in token_ids:
        end += len(ids)
        ends.append(end)
    return ends
