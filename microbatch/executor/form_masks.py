"""Logits of tokens that the form of an answer does not allow become minus infinity, in the rows that have a form."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microbatch.core.ports import FormMatcher, Forms

_BITS = 32


class FormMasks:
    """The rows of a batch whose answers have a form, with the memory for their masks: a bit for each token."""

    def __init__(self, rows: Sequence[tuple[int, FormMatcher]], forms: Forms, device: torch.device) -> None:
        self._forms = forms
        self._matchers = [matcher for _, matcher in rows]
        self._rows = torch.tensor([row for row, _ in rows], dtype=torch.int64, device=device)
        self._each_bit = torch.arange(_BITS, dtype=torch.int32, device=device)
        self._words: torch.Tensor | None = None

    def apply(self, logits: torch.Tensor) -> None:
        """Change these rows of ``logits`` ``[N, V]``; the others are not touched."""
        words = -(-logits.shape[1] // _BITS)
        if self._words is None:
            pinned = logits.device.type == "cuda"
            self._words = torch.empty(len(self._matchers), words, dtype=torch.int32, pin_memory=pinned)
        self._forms.fill(self._matchers, self._words.data_ptr(), words * self._words.element_size())
        packed = self._words.to(logits.device, non_blocking=True)
        forbidden = (packed[:, :, None] >> self._each_bit & 1 == 0).flatten(1)[:, : logits.shape[1]]
        logits[self._rows] = logits[self._rows].masked_fill_(forbidden, -torch.inf)
