"""A whole layer of Llama and its kin as one call of the C kernels: no waking of threads and no Python in between.

Only where all parts of the layer are fused already (``executor/fused.py``), and only in the packed step. The kernels
and their order are those of the parts, so the result is the same to the bit.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from microbatch.executor.attention import PagedStep
from microbatch.executor.packing import PackedLinear
from microbatch_kernels.attention_cpu import CpuAttention
from microbatch_kernels.attention_inputs import AttentionOptions
from microbatch_kernels.cpu_layer import CpuLayer
from microbatch_kernels.cpu_structs import Layer, Linear, Norm, Rotate
from microbatch_kernels.packed_weight import PackedWeight

#: Layers that compute: x += attention(norm(x)), then x += mlp(norm(x)).
PLAIN_LAYERS: Final = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"})


class FusedLayer:
    """The forward of a decoder layer in the packed step; else the original runs."""

    def __init__(self, module: Any, layer: CpuLayer, joint: PackedWeight, bias: torch.Tensor | None) -> None:
        attention, mlp = module.self_attn, module.mlp
        self._original, self._layer, self._index = module.forward, layer, attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._heads: int = attention.q_proj.out_features // self._head_dim
        self._kv_heads: int = attention.k_proj.out_features // self._head_dim
        self._options: AttentionOptions = attention.forward.options
        self._inner_size: int = mlp.up_proj.out_features
        self._kept = (bias, module.input_layernorm.weight, module.post_attention_layernorm.weight)
        self._call = Layer(
            before=_norm(module.input_layernorm),
            between=_norm(module.post_attention_layernorm),
            qkv=joint.call(bias),
            out=_linear(attention.o_proj),
            inner=mlp.up_proj.packed.call(gate=mlp.gate_proj.packed),
            down=_linear(mlp.down_proj),
        )

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As the module's own: ``hidden_states`` ``[1, T, hidden]``."""
        step: PagedStep | None = kwargs.get("paged")
        if cache is None and step is not None and step.packed is None and self._fits(step, position_embeddings):
            return self._run(hidden_states, step, position_embeddings)
        original = self._original(
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        return original  # type: ignore[no-any-return]

    def _fits(self, step: PagedStep, position_embeddings: Any) -> bool:
        attend, kv = step.backend.attend, step.store.kv[self._index]
        if position_embeddings is None or position_embeddings[0].shape[-1] != self._head_dim:
            return False
        probe = position_embeddings[0].expand(self._heads, -1, -1).transpose(0, 1)
        return isinstance(attend, CpuAttention) and attend.fits(probe, kv)

    def _run(self, hidden_states: torch.Tensor, step: PagedStep, position_embeddings: Any) -> torch.Tensor:
        """The residual stream is a copy of ``hidden_states`` and becomes the result."""
        attend: Any = step.backend.attend
        x = hidden_states.clone(memory_format=torch.contiguous_format)
        tokens, last = x.shape[1], self._heads + self._kv_heads
        normed, delta = torch.empty_like(x), torch.empty_like(x)
        states = x.new_empty(tokens, last + self._kv_heads, self._head_dim)
        inner, attended = x.new_empty(tokens, self._inner_size), x.new_empty(tokens, self._heads, self._head_dim)
        cosines, sines = (part[0].contiguous() for part in position_embeddings)
        call, kv, inputs = self._call, step.store.kv[self._index], step.inputs
        at = {name: tensor.data_ptr() for name, tensor in (("x", x), ("normed", normed), ("delta", delta))}
        _set_norm(call.before, at["x"], None, at["normed"], x)
        _set_linear(call.qkv, at["normed"], states.data_ptr(), tokens)
        _set_linear(call.out, attended.data_ptr(), at["delta"], tokens)
        _set_norm(call.between, at["x"], at["delta"], at["normed"], x)
        _set_linear(call.inner, at["normed"], inner.data_ptr(), tokens)
        _set_linear(call.down, inner.data_ptr(), at["delta"], tokens)
        _set_norm(call.after, at["x"], at["delta"], None, x)
        width = states.shape[1] * self._head_dim
        call.rotate = Rotate(
            states.data_ptr(), cosines.data_ptr(), sines.data_ptr(), tokens, width, last, self._head_dim
        )
        call.keys, call.values = attend.write_calls(
            kv, states[:, self._heads : last], states[:, last:], inputs.slot_mapping
        )
        call.attention = attend.attention_call(states[:, : self._heads], kv, inputs, self._options, attended)
        step.note(self._options)
        self._layer.run(call)
        return x


def _norm(module: Any) -> Norm:
    return Norm(weight=module.weight.data_ptr(), eps=module.variance_epsilon)


def _linear(module: PackedLinear) -> Linear:
    return module.packed.call(module.bias)


def _set_norm(call: Norm, x: int, more: int | None, y: int | None, like: torch.Tensor) -> None:
    call.x, call.more, call.y = x, more, y
    call.rows, call.dim = like.shape[1:]


def _set_linear(call: Linear, x: int, y: int, rows: int) -> None:
    call.x, call.y, call.rows = x, y, rows
