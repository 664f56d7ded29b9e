"""A whole layer of Llama and its kin as one call of the C kernels: no waking of threads and no Python in between.

Only where all parts of the layer are fused already (``executor/fused.py``), and only over the paged store. The kernels
and their order are those of the parts, so the result is the same to the bit. Of a padded batch only the valid tokens
are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from microbatch.executor.attention import PagedStep
from microbatch.executor.cache import PagedCache
from microbatch.executor.packing import PackedLinear
from microbatch_kernels.attention_cpu import CpuAttention
from microbatch_kernels.attention_inputs import AttentionOptions
from microbatch_kernels.cpu_layer import CpuLayer
from microbatch_kernels.cpu_structs import Layer, Linear, Norm, Rotate
from microbatch_kernels.packed_weight import PackedWeight

#: Layers that compute: x += attention(norm(x)), then x += mlp(norm(x)).
PLAIN_LAYERS: Final = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"})


class FusedLayer:
    """The forward of a decoder layer over the paged store, in the packed step and inside ``generate``; else the
    original runs."""

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
        """As the module's own: ``hidden_states`` ``[1, T, hidden]`` of a packed step, ``[B, S, hidden]`` of a padded
        batch with its cache."""
        step: PagedStep | None = kwargs.get("paged") if cache is None else None
        if type(cache) is PagedCache:
            step = cache.step
        if step is not None and self._fits(step, position_embeddings):
            if cache is not None:
                cache.count(self._index, hidden_states.shape[1])
            return self._run_valid(hidden_states, step, position_embeddings)
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
        query = position_embeddings[0].new_empty(0, self._heads, self._head_dim)
        return isinstance(attend, CpuAttention) and attend.fits(query, kv)

    def _run_valid(self, hidden_states: torch.Tensor, step: PagedStep, position_embeddings: Any) -> torch.Tensor:
        """The valid tokens laid end to end, computed and put back; padding stays what it was."""
        batch, valid = len(hidden_states), step.packed
        rotations = [part.expand(batch, -1, -1).flatten(0, 1) for part in position_embeddings]
        result = hidden_states.clone(memory_format=torch.contiguous_format)
        rows = result.view(-1, result.shape[-1])
        if valid is None:
            self._run(rows, step, rotations)
        else:
            x = rows[valid]
            self._run(x, step, [part[valid] for part in rotations])
            rows[valid] = x
        return result

    def _run(self, x: torch.Tensor, step: PagedStep, rotations: Sequence[torch.Tensor]) -> None:
        """In place over the residual stream ``x`` ``[T, hidden]``."""
        attend: Any = step.backend.attend
        tokens, last = len(x), self._heads + self._kv_heads
        normed, delta = torch.empty_like(x), torch.empty_like(x)
        states = x.new_empty(tokens, last + self._kv_heads, self._head_dim)
        inner, attended = x.new_empty(tokens, self._inner_size), x.new_empty(tokens, self._heads, self._head_dim)
        cosines, sines = (part.contiguous() for part in rotations)
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


def _norm(module: Any) -> Norm:
    return Norm(weight=module.weight.data_ptr(), eps=module.variance_epsilon)


def _linear(module: PackedLinear) -> Linear:
    return module.packed.call(module.bias)


def _set_norm(call: Norm, x: int, more: int | None, y: int | None, like: torch.Tensor) -> None:
    call.x, call.more, call.y = x, more, y
    call.rows, call.dim = like.shape


def _set_linear(call: Linear, x: int, y: int, rows: int) -> None:
    call.x, call.y, call.rows = x, y, rows
