"""How near are the Triton kernels to the bandwidth of a GPU, and what do CUDA graphs give a decode step?

Needs a CUDA device and triton. ``bench/gpu_ops.py`` says how the operations are measured. The decode loop is the whole
engine under ``continuous``, prompts of 256 random tokens and 128 out, ``ignore_eos``: the time of a step is the median
over the rows of (end - first token) / (tokens - 1).

    python -m bench.gpu [--model MODEL] [--skip-loop]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from typing import Any

import torch

from bench.report import median, write
from microbatch import Engine, SamplingParams

WRITES = (16, 512, 8192)
DECODES = ((1, 1024), (1, 32768), (8, 1024), (8, 8192), (32, 1024), (32, 8192), (128, 1024))
PREFILLS = ((512, 512), (2048, 2048), (2048, 8192), (256, 16384))
ROWS = (1, 8, 32, 64)
TOKENS_IN, TOKENS_OUT = 256, 128


def measure_ops(device: torch.device) -> dict[str, Any]:
    """Every operation on every shape."""
    from bench.gpu_ops import Shape, Stopwatch, copy_bandwidth, measure_decode, measure_prefill, measure_write

    watch, shape = Stopwatch(device), Shape()
    bandwidth = copy_bandwidth(watch, device)
    result: dict[str, Any] = {"copy_gb_per_s": round(bandwidth / 1e9, 1), "write": [], "decode": [], "prefill": []}
    for tokens in WRITES:
        result["write"].append(measure_write(watch, bandwidth, device, tokens, shape))
    for rows, context in DECODES:
        result["decode"].append(measure_decode(watch, bandwidth, device, rows, context, shape))
    for new, context in PREFILLS:
        result["prefill"].append(measure_prefill(watch, bandwidth, device, new, context, shape))
    return result


async def measure_step(model: str, rows: int, cuda_graphs: bool) -> float:
    """Milliseconds of a decode step of so many rows."""
    rnd = random.Random(9)
    prompts = [[rnd.randrange(100, 1000) for _ in range(TOKENS_IN)] for _ in range(rows)]
    params = SamplingParams(max_tokens=TOKENS_OUT, temperature=0, ignore_eos=True)
    settings: dict[str, Any] = {"policy": "continuous", "max_num_seqs": rows, "prefix_cache": False}
    async with Engine(model, device="cuda", cuda_graphs=cuda_graphs, max_model_len=1024, **settings) as engine:
        for _ in range(2):  # the first round compiles and warms up
            outs = await asyncio.gather(*[engine.generate(prompt, params) for prompt in prompts])
    steps = []
    for out in outs:
        assert out.timings.ttft is not None and out.timings.e2e is not None
        steps.append((out.timings.e2e - out.timings.ttft) / (TOKENS_OUT - 1))
    return median(steps, 6) * 1000


async def measure_loop(model: str) -> list[dict[str, Any]]:
    """The decode loop at every number of rows, with and without graphs."""
    found = []
    for rows in ROWS:
        eager, graphs = [await measure_step(model, rows, cuda_graphs) for cuda_graphs in (False, True)]
        found.append({
            "rows": rows,
            "step_ms_without_graphs": round(eager, 3),
            "step_ms": round(graphs, 3),
            "tokens_per_s": round(rows / graphs * 1000, 1),
            "times_without_graphs": round(eager / graphs, 2),
        })  # fmt: skip
        print(found[-1], flush=True)
    return found


def main(model: str, skip_loop: bool) -> dict[str, Any]:
    """Everything; returns what is kept."""
    import triton

    device = torch.device("cuda")
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device),
        "capability": capability,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "ops": measure_ops(device),
    }
    for name in ("write", "decode", "prefill"):
        for line in result["ops"][name]:
            print(name, line, flush=True)
    if not skip_loop:
        result["model"] = model or "SmolLM2-135M-Instruct"
        result["loop"] = asyncio.run(measure_loop(model))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Triton kernels and CUDA graphs")
    parser.add_argument("--model", default="", help="folder or hub name; the embedded model without it")
    parser.add_argument("--skip-loop", action="store_true", help="only the single operations")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu: no CUDA device here, nothing was measured", file=sys.stderr)
        sys.exit(2)
    kept = main(arguments.model, arguments.skip_loop)
    write("gpu", (__doc__ or "").partition("\n")[0], kept)
