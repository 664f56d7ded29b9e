"""Whole parts of a layer on the C kernels: norm, gated MLP, and the attention of Llama and its kin.

A part is replaced only where a trial on random input gives what the original gives, and the probe at load compares the
logits of the whole model; everything else stays as transformers wrote it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from microbatch.executor.attention import PagedStep
from microbatch.executor.fused_layer import PLAIN_LAYERS, FusedLayer
from microbatch.executor.packing import PackedLinear
from microbatch_kernels.attention_inputs import AttentionOptions
from microbatch_kernels.cpu_layer import CpuLayer
from microbatch_kernels.packed_weight import PackedWeight

#: Attention modules that compute: projections, rotary positions over whole heads, attention, projection.
_PLAIN_ATTENTION: Final = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention"})
_TOLERANCE: Final = 1e-4


def fuse_model(model: nn.Module, layer: CpuLayer) -> None:
    """Replace what can be replaced in a model whose linear layers are packed with float32 weights or smaller."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            _try(module, _fused_norm(layer), getattr(module, "weight", None))
        elif all(isinstance(getattr(module, f"{name}_proj", None), PackedLinear) for name in ("gate", "up", "down")):
            _try(module, _fused_mlp, module.gate_proj.packed.panels[0, :, 0])  # type: ignore[union-attr, index]
        elif type(module).__name__ in _PLAIN_ATTENTION:
            _fuse_attention(module, layer)
    for module in model.modules():
        if type(module).__name__ in PLAIN_LAYERS:
            _fuse_layer(module, layer)


def _try(module: nn.Module, forward: Callable[..., torch.Tensor], like: Any) -> None:
    """Give ``module`` this forward if it computes the same on random rows as long as ``like``."""
    if not isinstance(like, torch.Tensor) or like.device.type != "cpu":
        return
    x = torch.randn(3, like.shape[0], generator=torch.Generator().manual_seed(0))
    try:
        expected, got = module(x), forward(module, x)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return
    # By the size of what comes out: where weights are small, any two results are near each other.
    if expected.shape == got.shape and (expected - got).abs().max() <= _TOLERANCE * expected.abs().max():
        module.forward = types.MethodType(forward, module)


def _fused_norm(layer: CpuLayer) -> Callable[..., torch.Tensor]:
    def forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return layer.rms_norm(hidden_states, module.weight, module.variance_epsilon)

    return forward


def _fused_mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    if module.gate_proj.bias is not None or module.up_proj.bias is not None:
        raise AttributeError("biases have no place in the gated kernel")
    hidden = module.up_proj.packed.linear(x, gate=module.gate_proj.packed)
    return module.down_proj(hidden)  # type: ignore[no-any-return]


def _fuse_attention(module: Any, layer: CpuLayer) -> None:
    """One product for query, key and value where their columns fill whole panels; rotation in place."""
    projections = [module.q_proj, module.k_proj, module.v_proj]
    if not all(isinstance(p, PackedLinear) and p.out_features % p.packed.panels.shape[2] == 0 for p in projections):
        return
    if len({p.bias is None for p in projections}) > 1:
        return
    joint = PackedWeight.join([p.packed for p in projections])
    first = 0
    for projection in projections:
        projection.packed, first = joint.part(first, projection.out_features), first + projection.out_features
    biases = [p.bias for p in projections if p.bias is not None]
    bias = torch.cat(biases) if biases else None
    module.forward = _FusedAttention(module, layer, joint, bias)


def _fuse_layer(module: Any, layer: CpuLayer) -> None:
    """A whole layer, if all its parts are fused."""
    attention, mlp = module.self_attn, module.mlp
    parts = (module.input_layernorm, module.post_attention_layernorm, mlp)
    packed = all(isinstance(m, PackedLinear) for m in (attention.o_proj, mlp.down_proj))
    if packed and isinstance(attention.forward, _FusedAttention) and all(map(_is_fused, parts)):
        module.forward = FusedLayer(module, layer, attention.forward.joint, attention.forward.bias)


def _is_fused(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), types.MethodType)


class _FusedAttention:
    """The forward of an attention module in the packed step; with a cache or padding the original runs."""

    def __init__(self, module: Any, layer: CpuLayer, joint: PackedWeight, bias: torch.Tensor | None) -> None:
        self._module, self._layer, self.joint, self.bias = module, layer, joint, bias
        self._original = module.forward
        self._head_dim: int = module.head_dim
        self._heads = module.q_proj.out_features // self._head_dim
        self._kv_heads = module.k_proj.out_features // self._head_dim
        window = module.sliding_window if hasattr(module, "sliding_window") else None
        if type(module).__name__ == "MistralAttention":
            window = module.config.sliding_window
        self.options = AttentionOptions(module.scaling, window)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """As the module's own: ``hidden_states`` ``[1, T, hidden]``."""
        paged: PagedStep | None = kwargs.get("paged")
        whole = position_embeddings is not None and position_embeddings[0].shape[-1] == self._head_dim
        if cache is not None or paged is None or paged.packed is not None or not whole:
            original = self._original(hidden_states, position_embeddings, attention_mask, cache, **kwargs)
            return original  # type: ignore[no-any-return]
        states = self.joint.linear(hidden_states[0], self.bias)
        cosines, sines = (part[0].contiguous() for part in position_embeddings)
        self._layer.rotate(states, cosines, sines, self._heads + self._kv_heads)
        heads = states.view(len(states), -1, self._head_dim)
        last = self._heads + self._kv_heads
        query, key, value = heads[:, : self._heads], heads[:, self._heads : last], heads[:, last:]
        out = paged.attend(self._module.layer_idx, query, key, value, self.options)
        return self._module.o_proj(out.view(1, len(states), -1)), None
