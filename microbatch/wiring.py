"""The composition root: the only module that names a concrete executor, K/V manager and policy together."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from microbatch import __version__
from microbatch.core.policies import ContinuousPolicy, WindowPolicy, make_policy
from microbatch.core.policy import Policy
from microbatch.core.ports import Executor, Forms, KVManager, Tokenizer
from microbatch.core.scheduler import Scheduler
from microbatch.engine.client import AsyncEngine
from microbatch.engine.engine import EngineCore
from microbatch.engine.loop import EngineLoop
from microbatch.engine.parts import EngineParts
from microbatch.errors import SetupError
from microbatch.settings import Settings, make_settings

if TYPE_CHECKING:
    from microbatch.executor.cpu_kernels import CpuKernels
    from microbatch.executor.profiling import StepShape
    from microbatch.executor.progress import Progress
    from microbatch.executor.run import PagedModel

logger = logging.getLogger(__name__)

#: On a CPU the store may grow to this many whole contexts, or to one for each row of a batch if that is more.
_FULL_CONTEXTS: Final = 8
#: Room is kept for the activations of a whole batch of prompts of this length; longer ones may have to be tried in
#: halves.
_USUAL_PROMPT: Final = 1024
#: Settings of the process around the engine; in a library they are the caller's own business.
_SERVER_ONLY = frozenset(
    {"host", "port", "api_key", "api_key_file", "log_level", "log_json", "otlp_endpoint", "drain_timeout_s"}
) | {
    "heartbeat_s",
    "send_timeout_s",
    "max_unread_tokens",
}


class Engine(AsyncEngine):
    """An engine by the name of its model: ``async with Engine("model", policy="window") as engine``.

    ``model``: a hub name, a folder, a GGUF file; empty for the embedded SmolLM2-135M-Instruct. Keywords are the
    settings of ``microbatch serve`` that concern the engine, with the same names and defaults; a wrong one raises
    ``SetupError`` at once, before anything is loaded. ``progress`` is told of downloads.
    """

    def __init__(self, model: str = "", *, progress: Progress | None = None, **settings: Any) -> None:
        for name in sorted(_SERVER_ONLY & settings.keys()):
            raise SetupError(f"setting {name!r} concerns the server, not the engine")
        chosen = make_settings({"model": model, **settings})
        policy_of(chosen)
        name = chosen.served_model_name[0] if chosen.served_model_name else model
        super().__init__(partial(build_engine, chosen, progress), model_name=name)

    @classmethod
    def of(cls, settings: Settings, progress: Progress | None = None) -> Engine:
        """The engine of a server's settings."""
        values = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in _SERVER_ONLY}
        return cls(progress=progress, **values)


def policy_of(settings: Settings) -> Policy:
    """The policy that the settings name; ``SetupError`` when there is none such or its arguments are wrong.
    ``policy_arg`` goes before the settings that policies take."""
    arguments: dict[str, float | int | str] = {}
    if settings.policy == WindowPolicy.name:
        arguments = {"max_batch_size": settings.max_batch_size, "window_ms": settings.window_ms}
    elif settings.policy == ContinuousPolicy.name:
        arguments = {"max_num_seqs": settings.max_num_seqs}
    return make_policy(settings.policy, {**arguments, **settings.policy_arguments()})


def build_engine(settings: Settings, progress: Progress | None = None) -> EngineParts:
    """Load the model, size the store, put the parts together. Blocks for as long as that takes; ``SetupError`` if it
    cannot."""
    from microbatch.executor.loading import ModelSpec, load_model
    from microbatch.executor.progress import silent
    from microbatch.executor.serving import put_over_store
    from microbatch.text.forms.matching import GuidedForms
    from microbatch.text.forms.vocabularies import of_transformers
    from microbatch.text.tokenizer import HFTokenizer
    from microbatch_kernels.manager import PagedKVManager

    policy = policy_of(settings)
    spec = ModelSpec(
        settings.model, settings.dtype, settings.quantization, settings.device, max_model_len=settings.max_model_len
    )
    loaded = load_model(spec, progress=progress or silent)
    limit = settings.max_model_len or loaded.max_model_len
    model, step = put_over_store(
        loaded,
        block_size=settings.block_size,
        num_blocks=settings.kv_blocks,
        num_tokens=limit * max(_FULL_CONTEXTS, settings.max_batch_size),
        kernels=_cpu_kernels(settings),
        kv_dtype=settings.kv_dtype,
        step=largest_step(policy, settings, limit),
        memory_utilization=settings.memory_utilization,
    )
    # A model with attention of its own may measure distances in columns, and a cached prefix leaves a gap in them.
    shares_prefixes = not model.dense
    prefix_cache = settings.prefix_cache and shares_prefixes
    model = with_swap_space(model, settings.swap_space)
    kv = PagedKVManager(
        model.store.num_blocks,
        settings.block_size,
        prefix_cache=prefix_cache,
        num_host_blocks=model.host.num_blocks if model.host is not None else 0,
    )
    forms = GuidedForms(partial(of_transformers, loaded.tokenizer, model.vocab_size, loaded.eos_token_ids))
    graph_rows = settings.max_num_seqs if settings.cuda_graphs else 0
    template = settings.chat_template
    return assemble(
        make_executor(policy, model, loaded.eos_token_ids, forms=forms, graph_rows=graph_rows, max_model_len=limit),
        kv,
        policy,
        HFTokenizer(loaded.tokenizer, model.vocab_size, loaded.eos_token_ids, template, settings.tool_parser),
        model_name=settings.served_model_name[0] if settings.served_model_name else loaded.name,
        max_model_len=limit,
        max_queue=settings.max_queue,
        queue_timeout_s=settings.queue_timeout_s,
        request_timeout_s=settings.request_timeout_s,
        forms=forms,
        system_prompt=settings.system_prompt,
        max_num_batched_tokens=step.num_tokens if step.packed else settings.max_num_batched_tokens,
        kv_bytes_per_token=model.store.bytes_per_token,
        shares_prefixes=shares_prefixes,
        fingerprint=fingerprint_of(settings, loaded.name, str(loaded.dtype)),
    )


def fingerprint_of(settings: Settings, name: str, dtype: str) -> str:
    """Of what decides the numbers that a model computes. The same for the same settings on any machine."""
    parts = (__version__, name, dtype, settings.quantization, settings.kv_dtype, settings.cpu_weights)
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def with_swap_space(model: PagedModel, gib: float) -> PagedModel:
    """The model with so much host memory for the K/V of sequences that lose their blocks."""
    from microbatch.executor.memory import available_memory
    from microbatch_kernels.host_pool import HostPool

    num_bytes = int(gib * 2**30)
    if num_bytes == 0:
        return model
    if model.dense:
        raise SetupError(
            f"swap_space needs a model whose attention can run over the paged store, and that of"
            f" {type(model.model).__name__} cannot"
        )
    if num_bytes > available_memory():
        raise SetupError(
            f"swap_space of {gib:g} GiB is more than the {available_memory() / 2**30:.1f} GiB that are free"
        )
    host = HostPool.of_size(model.store.pools, num_bytes)
    if host.num_blocks == 0:
        raise SetupError(
            f"swap_space of {gib:g} GiB does not hold a single block of {model.store.bytes_per_block} bytes"
        )
    logger.info("swap space: %d blocks of host memory", host.num_blocks)
    return replace(model, host=host)


def _cpu_kernels(settings: Settings) -> CpuKernels | None:
    from microbatch.executor.cpu_kernels import WEIGHT_DTYPES, CpuKernels
    from microbatch.executor.embedded import default_home

    if not settings.cpu_kernels:
        return None
    return CpuKernels(default_home() / "kernels", WEIGHT_DTYPES[settings.cpu_weights])


def largest_step(policy: Policy, settings: Settings, max_model_len: int) -> StepShape:
    """The largest step that policy and settings allow; of a padded batch, one of prompts of a usual length."""
    from microbatch.executor.profiling import StepShape

    parameters = policy.parameters()
    if not policy.run_to_completion:
        rows = int(parameters.get("max_num_seqs", settings.max_num_seqs))
        return StepShape(rows, settings.max_num_batched_tokens, max_model_len, packed=True)
    rows = int(parameters.get("max_batch_size", 1))
    return StepShape(rows, rows * min(max_model_len, _USUAL_PROMPT), max_model_len, packed=False)


def make_executor(
    policy: Policy,
    model: PagedModel,
    eos_token_ids: Collection[int],
    *,
    forms: Forms | None = None,
    graph_rows: int = 0,
    max_model_len: int = 0,
) -> Executor:
    """``model.generate`` for policies that run to completion, the packed step loop for the others: its decode steps of
    up to ``graph_rows`` rows as CUDA graphs where there can be such."""
    from microbatch.executor.generate import GenerateExecutor
    from microbatch.executor.graphs import make_graphs
    from microbatch.executor.paged import PagedExecutor

    if policy.run_to_completion:
        return GenerateExecutor(model, eos_token_ids, forms)
    graphs = make_graphs(model, graph_rows, max_model_len) if graph_rows else None
    return PagedExecutor(model, eos_token_ids, graphs, forms)


def assemble(
    executor: Executor,
    kv: KVManager,
    policy: Policy,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    max_model_len: int,
    max_queue: int = 256,
    queue_timeout_s: float | None = None,
    request_timeout_s: float | None = None,
    forms: Forms | None = None,
    system_prompt: str | None = None,
    max_num_batched_tokens: int = 2048,
    kv_bytes_per_token: int = 0,
    shares_prefixes: bool = True,
    fingerprint: str = "",
) -> EngineParts:
    """An engine from ready parts; with a fake executor and tokenizer it needs no model."""
    held = kv.max_num_tokens()
    if held < max_model_len:
        logger.warning("the K/V store holds %d tokens: the context is cut from %d to that", held, max_model_len)
    scheduler = Scheduler(
        kv, policy, eos_token_ids=tokenizer.eos_token_ids, max_num_batched_tokens=max_num_batched_tokens
    )
    return EngineParts(
        loop=EngineLoop(EngineCore(scheduler, kv_bytes_per_token=kv_bytes_per_token), executor, max_queue=max_queue),
        tokenizer=tokenizer,
        model_name=model_name,
        max_model_len=min(held, max_model_len),
        forms=forms,
        system_prompt=system_prompt,
        shares_prefixes=shares_prefixes,
        fingerprint=fingerprint,
        queue_timeout_s=queue_timeout_s,
        request_timeout_s=request_timeout_s,
    )
