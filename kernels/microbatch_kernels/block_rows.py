"""The block tables of a batch as one piece of memory that lasts from step to step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

_NOTHING: Sequence[int] = ()


class BlockRows:
    """Rows of one width, padded with the null block 0. A row is written again only when it is given another table.

    A step of many decodes changes few tables, and reading all of their ints anew would cost more than all else that a
    step needs: they lie scattered in memory, and no cache holds them after a forward.
    """

    def __init__(self) -> None:
        self._given: list[Sequence[int]] = []
        self._width = 0
        self._ints = array("q")
        self._tensor = torch.empty(0, 0, dtype=torch.int64)

    def fill(self, tables: Sequence[Sequence[int]], width: int) -> torch.Tensor:
        """The first ``width`` blocks of each table: int64 ``[len(tables), width]`` on the CPU, valid until the next
        call. A table that was given must not change; one that is the same object in the same row is not read."""
        if width > self._width or len(tables) > len(self._given):
            self._make_room(len(tables), width)
        given = self._given
        for row, table in enumerate(tables):
            if table is not given[row]:
                self._write(row, table)
        return self._tensor[: len(tables), :width]

    def _write(self, row: int, table: Sequence[int]) -> None:
        start, width = row * self._width, self._width
        ints = array("q", table[:width])
        ints.frombytes(bytes(8 * (width - len(ints))))
        self._ints[start : start + width] = ints
        self._given[row] = table

    def _make_room(self, num_rows: int, width: int) -> None:
        num_rows = max(num_rows, len(self._given))
        self._width = max(self._width, 2 * width, 1)
        self._given = [_NOTHING] * num_rows
        self._ints = array("q", bytes(8 * num_rows * self._width))
        self._tensor = torch.frombuffer(self._ints, dtype=torch.int64).view(num_rows, self._width)
