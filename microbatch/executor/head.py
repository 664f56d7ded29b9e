"""The part of a model behind its hidden states: logits of any position, without a second forward.

A forward gives logits only where a token is sampled, because those of a long prompt would take more memory than all
else together. Log-probabilities of the prompt need them everywhere, if only a few at a time: so the hidden states are
kept for a moment, and the model is run over slices of them with its body put out of the way. What the model does with
logits after its head (a scale, a cap) is thus done too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

#: How far logits may differ from those of the whole forward, by the largest of them: 16 bits round that much.
_TOLERANCE: Final = 0.05


class Head:
    """The head of one causal model. ``hidden`` is what the body gave in the last forward inside ``watch``."""

    def __init__(self, model: Any) -> None:
        self._model = model
        bodies = [model.base_model, model.get_decoder(), getattr(model, "model", None)]
        self._bodies = [body for body in dict.fromkeys(bodies) if isinstance(body, nn.Module) and body is not model]
        self._kind: Any = None
        self._trusted: bool | None = None
        self.hidden: torch.Tensor | None = None

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Keep the hidden states ``[B, T, H]`` of forwards until the end of the block."""
        hooks = [body.register_forward_hook(self._note) for body in self._bodies]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.hidden = None

    def _note(self, body: nn.Module, arguments: Any, output: Any) -> None:
        self._kind, self.hidden = type(output), output[0]

    def fits(self, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether the head gives these ``logits`` ``[V]`` for ``hidden`` ``[H]``. Looked at once: some model may be
        built so that this does not work, and wrong numbers would pass unseen."""
        if self._trusted is None:
            expected, got = logits.float().nan_to_num(), self.logits(hidden[None])[0].float().nan_to_num()
            self._trusted = torch.allclose(expected, got, rtol=0, atol=_TOLERANCE * float(expected.abs().max()))
        return self._trusted

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[K, V]`` of ``[K, H]``, in the type of the model."""

        def body(*arguments: Any, **options: Any) -> Any:
            return (hidden[None],) if self._kind is tuple else self._kind(last_hidden_state=hidden[None])

        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with contextlib.ExitStack() as stack:
            for module in self._bodies:
                stack.enter_context(_replaced(module, body))
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        return logits


@contextlib.contextmanager
def _replaced(module: Any, forward: Any) -> Iterator[None]:
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
