"""The size of the pool: what a device has, what is free of it, what is left for blocks."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from microbatch.errors import SetupError
from microbatch.executor import device_memory
from microbatch.executor.device_memory import CudaMemory, HostMemory, memory_of
from microbatch.executor.memory import PoolWish, available_memory, pool_blocks, pool_text, size, weight_bytes
from microbatch.executor.profiling import StepProfile, StepShape
from microbatch_kernels.store import KVStore, LayerSpec
from tests.executor.tiny import tiny_model

GIB, MIB = 2**30, 2**20
STEP = StepShape(64, 2048, 4096, packed=True)


class FakeGpu:
    """A device of which a share may be used, as a GPU is."""

    def __init__(self, total: int, used: int, peak: int | None = 0) -> None:
        self._total, self._used, self._peak = total, used, peak

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self._used

    def room(self, utilization: float) -> int:
        return int(utilization * self._total) - self._used

    def reset_peak(self) -> None:
        pass

    def peak(self) -> int | None:
        return self._peak


def blocks_for(memory: Any, wish: PoolWish, activations: int, weights: int = 0) -> int:
    return pool_blocks(memory, wish, StepProfile(STEP, activations, "measured"), weights)


def test_what_is_left_of_a_gpu_goes_to_the_pool() -> None:
    """24 GiB, 14 in use: 0.80 of the whole is 19.2; 1 GiB of activations leaves 4.2 for blocks of 2 MiB."""
    memory = FakeGpu(24 * GIB, 14 * GIB)
    assert blocks_for(memory, PoolWish(0.80, 16, MIB // 8), GIB) == int(4.2 * 512) - 1
    assert blocks_for(memory, PoolWish(0.90, 16, MIB // 8), GIB) == int(6.6 * 512) - 1
    assert blocks_for(memory, PoolWish(0.80, 16, MIB // 8, max_blocks=100), GIB) == 100


@given(
    total=st.integers(GIB, 200 * GIB),
    used=st.floats(0, 0.9),
    share=st.floats(0.05, 0.98),
    activations=st.integers(0, 8 * GIB),
    per_token=st.integers(100, MIB),
)
def test_the_pool_never_exceeds_the_share(
    total: int, used: float, share: float, activations: int, per_token: int
) -> None:
    memory = FakeGpu(total, int(used * total))
    wish = PoolWish(share, 16, per_token)
    left = share * total - int(used * total) - activations
    try:
        blocks = blocks_for(memory, wish, activations)
    except SetupError:
        assert left < 2 * wish.bytes_per_block, "one block and the null block would have fitted"
    else:
        assert (blocks + 1) * wish.bytes_per_block <= left < (blocks + 2) * wish.bytes_per_block + 1


def test_no_room_is_an_error_with_all_numbers_and_what_to_do() -> None:
    with pytest.raises(SetupError) as caught:
        blocks_for(FakeGpu(16 * GIB, 13 * GIB), PoolWish(0.80, 16, 512 * 1024), GIB, weights=12 * GIB)
    for part in ("8.0 MiB", "16.00 GiB", "3.00 GiB are free", "weights of 12.00 GiB", "0.8 may", "needs 1.00 GiB"):
        assert part in caught.value.message
    for part in ("a step of 2048 tokens in 64 sequences", "--memory-utilization", "--max-num-batched-tokens"):
        assert part in caught.value.message


def test_the_pool_in_words() -> None:
    spec = LayerSpec(2, 8, 8, torch.float32, torch.device("cpu"))
    text = pool_text(KVStore([spec, spec], 40, 16), 256)
    assert text == (
        "K/V pool 160.0 KiB: 40 blocks of 16, 640 tokens of 256 bytes; room for 2.5 sequences of 256 tokens"
    )
    assert (size(3 * GIB // 2), size(-2 * MIB)) == ("1.50 GiB", "-2.0 MiB")


def test_weights_count_once_when_they_are_tied() -> None:
    model = tiny_model("gemma")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tensors = [*model.parameters(), *model.buffers()]
    assert weight_bytes(model) == sum(t.nbytes for t in tensors)


# ---- the machine


def machine(root: Path, total: int, available: int, **files: str) -> HostMemory:
    """A machine of files: meminfo, and control groups as ``{path with __ for /: text}``."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\n")
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostMemory(root)


def test_a_machine_without_limits(tmp_path: Path) -> None:
    memory = machine(tmp_path, 32 * GIB, 20 * GIB)
    assert (memory.total(), memory.free(), memory.room(0.8)) == (32 * GIB, 20 * GIB, 16 * GIB)


V2, V1 = "sys__fs__cgroup", "sys__fs__cgroup__memory"


@pytest.mark.parametrize(
    "files",
    [
        {f"{V2}__memory_DOT_max": str(8 * GIB), f"{V2}__memory_DOT_current": str(5 * GIB)},
        {f"{V1}__memory_DOT_limit_in_bytes": str(8 * GIB), f"{V1}__memory_DOT_usage_in_bytes": str(5 * GIB)},
        {
            "proc__self__cgroup": "0::/box/task\n",
            f"{V2}__box__memory_DOT_max": str(8 * GIB),
            f"{V2}__box__memory_DOT_current": str(5 * GIB),
            f"{V2}__box__task__memory_DOT_max": "max",
            f"{V2}__box__task__memory_DOT_current": str(GIB),
        },
        {
            "proc__self__cgroup": "9:name=systemd:/other\n4:cpu,memory:/box\n0::/\n",
            f"{V1}__box__memory_DOT_limit_in_bytes": str(8 * GIB),
            f"{V1}__box__memory_DOT_usage_in_bytes": str(6 * GIB),
            f"{V1}__box__memory_DOT_stat": f"cache {9 * GIB}\ninactive_file 7\ntotal_inactive_file {GIB}\n",
            f"{V1}__memory_DOT_limit_in_bytes": str(2**63 - 4096),
            f"{V1}__memory_DOT_usage_in_bytes": str(30 * GIB),
        },
        {
            "proc__self__cgroup": "0::/a/group/of/the/host\n",
            f"{V2}__memory_DOT_max": str(8 * GIB),
            f"{V2}__memory_DOT_current": str(7 * GIB),
            f"{V2}__memory_DOT_stat": f"anon {5 * GIB}\ninactive_file {2 * GIB}\n",
        },
    ],
    ids=["version 2", "version 1", "an outer group", "dropped pages", "a path of the host"],
)
def test_the_limit_of_a_container_counts(files: dict[str, str], tmp_path: Path) -> None:
    memory = machine(tmp_path, 64 * GIB, 40 * GIB, **files)
    assert (memory.total(), memory.free(), memory.room(0.5)) == (8 * GIB, 3 * GIB, int(1.5 * GIB))


def test_a_container_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    memory = machine(
        tmp_path, 64 * GIB, 40 * GIB, **{f"{V2}__memory_DOT_max": "100", f"{V2}__memory_DOT_current": "200"}
    )
    assert memory.free() == 0
    with pytest.raises(SetupError, match="no memory left"):
        blocks_for(memory, PoolWish(0.8, 16, 1000), 0)


def test_a_machine_that_does_not_tell(tmp_path: Path) -> None:
    memory = HostMemory(tmp_path)
    assert memory.total() == memory.free() == 4 * GIB
    memory.reset_peak()
    assert memory.peak() is None


def test_the_peak_is_the_growth_since_the_reset(tmp_path: Path) -> None:
    memory = machine(tmp_path, GIB, GIB, proc__self__status="Name: x\nVmHWM: 1000 kB\nVmRSS: 900 kB\n")
    memory.reset_peak()
    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"
    machine(tmp_path, GIB, GIB, proc__self__status="Name: x\nVmHWM: 1500 kB\nVmRSS: 900 kB\n")
    assert memory.peak() == 500 * 1024
    machine(tmp_path, GIB, GIB, proc__self__status="Name: x\nVmHWM: 400 kB\n")
    assert memory.peak() == 0


def test_the_real_machine_sees_what_is_taken_and_given_back() -> None:
    memory = HostMemory()
    memory.reset_peak()
    taken = torch.ones(64 * MIB, dtype=torch.uint8)
    del taken
    peak = memory.peak()
    if peak is None:
        pytest.skip("this machine does not let a process reset its peak")
    assert 60 * MIB < peak < 200 * MIB
    assert 0 < available_memory() <= memory.total()


# ---- a GPU, by torch's functions replaced


class FakeTorchCuda:
    """The functions of ``torch.cuda`` that ``CudaMemory`` calls."""

    def __init__(self) -> None:
        self.allocated, self.most, self.kept, self.others = 3 * GIB, 9 * GIB, 2 * GIB, GIB

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 24 * GIB - self.allocated - self.kept - self.others, 24 * GIB

    def empty_cache(self) -> None:
        self.kept = 0

    def synchronize(self, device: Any) -> None:
        pass

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.most = self.allocated

    def memory_allocated(self, device: Any) -> int:
        return self.allocated

    def max_memory_allocated(self, device: Any) -> int:
        return self.most


def test_a_gpu_counts_other_processes_and_not_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeTorchCuda()
    monkeypatch.setattr(device_memory, "torch", SimpleNamespace(cuda=cuda))
    memory = CudaMemory(torch.device("cuda", 0))
    memory.reset_peak()
    cuda.most = 5 * GIB
    assert memory.peak() == 2 * GIB
    assert (memory.total(), memory.free()) == (24 * GIB, 20 * GIB)
    assert memory.room(0.75) == 18 * GIB - 4 * GIB


def test_each_device_has_its_memory() -> None:
    kinds = [type(memory_of(torch.device(name))) for name in ("cuda", "cpu")]
    assert kinds == [CudaMemory, HostMemory]


# ---- the shape of a step


@pytest.mark.parametrize("rows", [1, 3, 64, 200])
@pytest.mark.parametrize("tokens", [16, 100, 2048])
@pytest.mark.parametrize("max_len", [7, 5000])
def test_a_step_is_spread_evenly_and_cut_in_proportion(rows: int, tokens: int, max_len: int) -> None:
    step = StepShape(rows, tokens, max_len, packed=True)
    lengths = step.lengths
    assert len(lengths) == min(rows, tokens) and max(lengths) - min(lengths) <= 1 and min(lengths) >= 1
    assert sum(lengths) == min(tokens, max_len * len(lengths)) or max(lengths) == max_len
    for limit in (16, 50, 10**6):
        part = step.cut(limit)
        assert part.num_tokens == min(tokens, limit) and max(part.lengths) <= max(lengths)


def test_the_setting_that_makes_a_step_smaller() -> None:
    names = [StepShape(1, 1, 1, packed).setting for packed in (True, False)]
    assert names == ["--max-num-batched-tokens", "--max-batch-size"]
    assert len(set(itertools.chain(names))) == 2
