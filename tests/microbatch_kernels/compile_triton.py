"""Compile the Triton kernels for a GPU that is not there: the real compiler, the real assembler, no launch.

    python -m tests.microbatch_kernels.compile_triton CAPABILITY [CASE ...]

prints a line of JSON for each kernel of each case: its name, bytes of shared memory and of stack, how many instructions
are products of matrices. The interpreter takes much that the compiler does not, and knows no limits of a processor.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.layer_kv import LayerKV
from microbatch_kernels.triton_decode import decode_attention
from microbatch_kernels.triton_launch import INTERPRETED, Scales
from microbatch_kernels.triton_prefill import prefill_attention
from microbatch_kernels.triton_write import write_slots

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
#: Type of the model, head size of keys and of values, heads, K/V heads; then what else it has.
CASES: dict[str, tuple[torch.dtype, int, int, int, int, dict[str, Any]]] = {
    "llama 8B": (BRAIN, 128, 128, 32, 8, {}),
    "smollm2 135M": (HALF, 64, 64, 9, 3, {}),
    "phi 2": (HALF, 80, 80, 32, 32, {}),
    "gpt-oss": (BRAIN, 64, 64, 64, 8, {"sinks": torch.zeros(64, dtype=BRAIN), "sliding_window": 128}),
    "gemma 2": (BRAIN, 256, 256, 8, 4, {"softcap": 50.0, "sliding_window": 4096}),
    "unequal sizes": (BRAIN, 192, 128, 16, 16, {}),
    "float32": (FULL, 64, 64, 9, 3, {}),
    "float32, 256": (FULL, 256, 256, 8, 4, {}),
    "512": (BRAIN, 512, 512, 8, 1, {}),
    "float32, 512": (FULL, 512, 512, 8, 1, {}),
    "int8": (BRAIN, 128, 128, 32, 8, {"kept_as": torch.int8}),
    "fp8": (HALF, 128, 128, 32, 8, {"kept_as": torch.float8_e4m3fn}),
}
_BLOCK_SIZE = 16
_TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class AbsentGPU:
    """What Triton asks its driver for before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_case(
    dtype: torch.dtype, key_dim: int, value_dim: int, heads: int, kv_heads: int, more: dict[str, Any]
) -> None:
    """Launch every op on a mixed batch; the launches only compile."""
    more = dict(more)
    kept_as = more.pop("kept_as", dtype)
    rows = [(range(1, 31), 479, 1), (range(31, 71), 300, 340)]
    inputs = AttentionInputs.build([([*ids], start, new) for ids, start, new in rows], _BLOCK_SIZE, torch.device("cpu"))
    spots = (71, _BLOCK_SIZE, kv_heads)
    kv = LayerKV(torch.zeros(*spots, key_dim).to(kept_as), torch.zeros(*spots, value_dim).to(kept_as))
    scales = None if kept_as is dtype else Scales(torch.ones(spots), torch.ones(spots))
    query = torch.zeros(341, heads, key_dim, dtype=dtype)
    out = torch.zeros(341, heads, value_dim, dtype=dtype)
    options = AttentionOptions(0.1, **more)
    decode_attention(out, query, kv, inputs, options, scales=scales, num_splits=8)
    prefill_attention(out, query, kv, inputs, options, scales=scales)
    if scales is None:
        states = [torch.zeros(341, kv_heads, dim, dtype=dtype) for dim in (key_dim, value_dim)]
        write_slots(kv.keys, kv.values, states[0], states[1], inputs.slot_mapping)


def report(case: str, kernel: Any) -> dict[str, Any]:
    """What became of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([_TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found is not None, usage.stdout
    return {
        "case": case,
        "kernel": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "registers": int(found[1]),
        "stack": int(found[2]),
        "products": len(re.findall(r"\bw?gmma\.mma|\bmma\.sync", kernel.asm["ptx"])),
    }


def main(capability: int, names: list[str]) -> None:
    """Compile the cases of these names, or all."""
    assert not INTERPRETED
    driver.set_active(AbsentGPU(capability))
    launch = JITFunction.run
    for name in names or CASES:

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, case: str = name, **kwargs: Any) -> None:
            print(json.dumps(report(case, launch(self, *args, grid=grid, warmup=True, **kwargs))), flush=True)

        JITFunction.run = compile_only
        compile_case(*CASES[name])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
