"""The composition root: the only module that names a concrete executor, K/V manager and policy together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from microbatch.core.policies import make_policy
from microbatch.core.policy import Policy
from microbatch.core.ports import Executor, KVManager, Tokenizer
from microbatch.core.scheduler import Scheduler
from microbatch.engine.client import AsyncEngine, EngineParts
from microbatch.engine.engine import EngineCore
from microbatch.engine.loop import EngineLoop
from microbatch.errors import SetupError

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]


class Engine(AsyncEngine):
    """An engine by the name of its model: ``async with Engine("model", policy="window") as engine``.

    ``model``: a hub name, a folder, a GGUF file; empty for the embedded SmolLM2-135M-Instruct. Keywords are the settings
    of ``microbatch serve`` that concern the engine (see ``build_engine``); a wrong one raises ``SetupError`` at once,
    before anything is loaded.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        try:
            build = partial(build_engine, model, **settings)
            check_settings(**settings)
        except TypeError as error:
            raise SetupError(f"Engine: {error}") from None
        super().__init__(build, model_name=settings.get("served_model_name") or model)


def check_settings(
    *, policy: str = "window", max_batch_size: int = 8, window_ms: float = 50.0, policy_args: Mapping[str, Any] = {}, **_: Any
) -> Policy:
    """The policy that the settings name; ``SetupError`` when there is none such or its arguments are wrong."""
    arguments = dict(policy_args)
    if policy == "window":
        arguments = {"max_batch_size": max_batch_size, "window_ms": window_ms, **arguments}
    return make_policy(policy, arguments)


def build_engine(
    model: str = "",
    *,
    policy: str = "window",
    policy_args: Mapping[str, Any] = {},
    max_batch_size: int = 8,
    window_ms: float = 50.0,
    max_model_len: int | None = None,
    max_queue: int = 256,
    queue_timeout_s: float | None = None,
    request_timeout_s: float | None = None,
    system_prompt: str | None = None,
    chat_template: str | None = None,
    served_model_name: str | None = None,
    dtype: str = "auto",
    quantization: str = "none",
    device: str = "auto",
    block_size: int = 16,
    kv_blocks: int | None = None,
    prefix_cache: bool = True,
    attention: str = "auto",
    home: Path | None = None,
    local_files_only: bool = False,
    progress: Progress | None = None,
) -> EngineParts:
    """Load the model, size the store, put the parts together. Blocks for as long as that takes; ``SetupError`` if it cannot.

    Lengths in tokens, times in seconds except ``window_ms``. Everything else as in the table of settings.
    """
    chosen = check_settings(policy=policy, policy_args=policy_args, max_batch_size=max_batch_size, window_ms=window_ms)
    from microbatch_kernels.manager import PagedKVManager

    from microbatch.executor.loading import ModelSpec, load_model
    from microbatch.executor.serving import serve_with_generate
    from microbatch.text.tokenizer import HFTokenizer

    options: dict[str, Any] = {} if progress is None else {"progress": progress}
    loaded = load_model(ModelSpec(model, dtype, quantization, device, local_files_only), home=home, **options)
    limit = loaded.max_model_len if max_model_len is None else max_model_len
    if limit > loaded.max_model_len:
        raise SetupError(f"max_model_len {limit} is more than the model's context of {loaded.max_model_len} tokens")
    executor, num_blocks = serve_with_generate(
        loaded, block_size=block_size, num_blocks=kv_blocks, num_tokens=limit * max(8, max_batch_size), attention=attention
    )
    kv = PagedKVManager(num_blocks, block_size, prefix_cache=prefix_cache)
    tokenizer = HFTokenizer(loaded.tokenizer, executor.model.vocab_size, loaded.eos_token_ids, chat_template)
    return assemble(
        executor,
        kv,
        chosen,
        tokenizer,
        model_name=served_model_name or loaded.name,
        max_model_len=limit,
        max_queue=max_queue,
        queue_timeout_s=queue_timeout_s,
        request_timeout_s=request_timeout_s,
        system_prompt=system_prompt,
    )


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
    system_prompt: str | None = None,
) -> EngineParts:
    """An engine from ready parts; with a fake executor and tokenizer it needs no model."""
    held = kv.max_num_tokens()
    if held < max_model_len:
        logger.warning("the K/V store holds %d tokens: the context is cut from %d to that", held, max_model_len)
    scheduler = Scheduler(kv, policy, eos_token_ids=tokenizer.eos_token_ids)
    return EngineParts(
        loop=EngineLoop(EngineCore(scheduler), executor, max_queue=max_queue),
        tokenizer=tokenizer,
        model_name=model_name,
        max_model_len=min(held, max_model_len),
        system_prompt=system_prompt,
        queue_timeout_s=queue_timeout_s,
        request_timeout_s=request_timeout_s,
    )
