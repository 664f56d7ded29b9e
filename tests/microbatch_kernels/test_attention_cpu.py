"""The C kernel of attention against the naive one over random batches, and what it promises to the bit."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass

import pytest
import torch

from microbatch_kernels.attention_cpu import CpuAttention
from microbatch_kernels.attention_inputs import AttentionInputs, AttentionOptions
from microbatch_kernels.attention_naive import attention_naive
from microbatch_kernels.store import KVStore, LayerSpec

CPU = torch.device("cpu")
NAMES = ["auto", "int8", "fp8"]
NAN = float("nan")


@pytest.fixture(scope="module")
def attention(library: ctypes.CDLL) -> CpuAttention:
    return CpuAttention(library)


@dataclass(frozen=True)
class Case:
    """Sequences in a store whose blocks lie in a random order, and a query for every position of each."""

    store: KVStore
    queries: list[torch.Tensor]
    tables: list[list[int]]
    options: AttentionOptions

    @classmethod
    def make(
        cls,
        seed: int,
        contexts: list[int],
        heads: tuple[int, int] = (6, 2),
        dims: tuple[int, int] = (20, 20),
        block: int = 4,
        name: str = "auto",
        **options: object,
    ) -> Case:
        rnd = random.Random(seed)
        torch.manual_seed(seed)
        sizes = [-(-context // block) for context in contexts]
        ids = rnd.sample(range(1, sum(sizes) + 4), sum(sizes))
        tables = [[ids.pop() for _ in range(size)] for size in sizes]
        spec = LayerSpec(heads[1], *dims, torch.float32, CPU).stored_as(name)
        store = KVStore([spec], sum(sizes) + 3, block)
        for table, context in zip(tables, contexts, strict=True):
            slots = torch.tensor([table[p // block] * block + p % block for p in range(context)])
            keys, values = (torch.randn(context, heads[1], dim) for dim in dims)
            store.kv[0].write(keys, values, slots)
        queries = [torch.randn(context, heads[0], dims[0]) for context in contexts]
        fields = {"scale": dims[0] ** -0.5, **options}
        return cls(store, queries, tables, AttentionOptions(**fields))

    def step(self, spans: list[tuple[int, int, int]]) -> tuple[torch.Tensor, AttentionInputs]:
        """The query and the inputs of (sequence, start, count) each."""
        query = torch.cat([self.queries[s][start : start + count] for s, start, count in spans])
        rows = [(self.tables[s], start, count) for s, start, count in spans]
        return query, AttentionInputs.build(rows, self.store.block_size, CPU)

    def run(self, attention: CpuAttention, spans: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """What the kernel gives, by span."""
        query, inputs = self.step(spans)
        out = attention(query, self.store.kv[0], inputs, self.options)
        return list(torch.split(out, [count for _, _, count in spans]))


def random_case(seed: int) -> tuple[Case, list[tuple[int, int, int]]]:
    """Anything that the kernel says it can do; the last tokens of each sequence as a decode, a chunk or a whole."""
    rnd = random.Random(seed)
    kv_heads, group = rnd.choice([1, 2, 3, 5]), rnd.choice([1, 2, 3, 8])
    key_dim = rnd.choice([8, 16, 20, 64, 80, 128, 256])
    value_dim = key_dim if rnd.random() < 0.6 else rnd.choice([1, 8, 12, 33, 96])
    contexts = [rnd.choice([1, 2, 15, 16, 17, 31, 33, 48, rnd.randrange(1, 90)]) for _ in range(rnd.randrange(1, 6))]
    heads = kv_heads * group
    case = Case.make(
        seed,
        contexts,
        (heads, kv_heads),
        (key_dim, value_dim),
        rnd.choice([1, 4, 16, 32]),
        rnd.choice(["auto", *NAMES]),
        sliding_window=rnd.choice([None, None, 1, 3, 16, 17, 200]),
        softcap=rnd.choice([None, None, 1.5, 30.0]),
        sinks=torch.linspace(-2, 3, heads) if rnd.random() < 0.3 else None,
    )
    counts = [rnd.choice([1, min(c, 2), c, rnd.randrange(1, c + 1)]) for c in contexts]
    return case, [(s, c - n, n) for s, (c, n) in enumerate(zip(contexts, counts, strict=True))]


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_random_batches_equal_the_naive_backend(first: int, attention: CpuAttention) -> None:
    for seed in range(first, first + 20):
        case, spans = random_case(seed)
        query, inputs = case.step(spans)
        kv = case.store.kv[0]
        assert attention.fits(query, kv), "torch operators would be tested"
        expected = attention_naive(query, kv, inputs, case.options)
        got = attention(query, kv, inputs, case.options)
        torch.testing.assert_close(got, expected, atol=3e-6, rtol=2e-5, msg=lambda m: f"seed {seed}: {m}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)])
def test_the_same_bits_however_a_prompt_is_cut_and_beside_whom(
    heads: tuple[int, int], window: int | None, name: str, attention: CpuAttention
) -> None:
    case = Case.make(7, [61, 40, 1, 33], heads, (20, 12), 4, name, sliding_window=window, softcap=8.0)
    whole = [case.run(attention, [(s, 0, len(q))])[0] for s, q in enumerate(case.queries)]
    rnd = random.Random(str((heads, window, name)))
    for most in (1, 2, 7, 40):
        places, found = [0] * 4, [[] for _ in range(4)]  # type: ignore[var-annotated]
        while any(place < len(q) for place, q in zip(places, case.queries, strict=True)):
            left = [len(q) - place for place, q in zip(places, case.queries, strict=True)]
            spans = [(s, places[s], min(n, rnd.randint(1, most))) for s, n in enumerate(left) if n]
            rnd.shuffle(spans)
            for (s, _, count), part in zip(spans, case.run(attention, spans), strict=True):
                found[s].append(part)
                places[s] += count
        for s in range(4):
            assert torch.equal(torch.cat(found[s]), whole[s]), f"sequence {s} in chunks of up to {most}"


def test_the_same_bits_with_one_thread_and_two(attention: CpuAttention) -> None:
    case = Case.make(8, [50, 3, 70, 17, 1, 29], (6, 2), (64, 64), 16)
    spans = [(0, 20, 30), (1, 2, 1), (2, 69, 1), (3, 0, 17), (4, 0, 1), (5, 28, 1)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(torch.cat(case.run(attention, spans)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["query", "keys", "values"])
def test_nan_in_one_sequence_stays_there(place: str, name: str, attention: CpuAttention) -> None:
    case = Case.make(9, [33, 18, 40], (6, 2), (20, 20), 4, name)
    spans = [(0, 32, 1), (1, 2, 16), (2, 39, 1)]
    before = case.run(attention, spans)
    if place == "query":
        case.queries[1][10] = NAN
    else:
        kv = case.store.kv[0]
        pool = {"keys": kv.key_scales, "values": kv.value_scales}[place] if name != "auto" else getattr(kv, place)
        assert pool is not None
        pool[case.tables[1][2], 1] = NAN  # position 9
    after = case.run(attention, spans)
    assert torch.equal(before[0], after[0]) and torch.equal(before[2], after[2])
    assert torch.equal(before[1][:7], after[1][:7]), "what comes before position 9 does not see it"
    if place == "query":
        assert after[1][8].isnan().all()
        assert torch.equal(before[1][[7, *range(9, 16)]], after[1][[7, *range(9, 16)]])
    else:
        assert after[1][7:].isnan().all()


def test_a_query_that_is_a_view_of_something_wider(attention: CpuAttention) -> None:
    case = Case.make(10, [21, 5], (6, 2), (20, 20), 4)
    query, inputs = case.step([(0, 4, 17), (1, 4, 1)])
    wide = torch.full((len(query), 10, 20), NAN)
    wide[:, 2:8] = query
    turned = query.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    kv = case.store.kv[0]
    right = attention(query, kv, inputs, case.options)
    assert torch.equal(attention(wide[:, 2:8], kv, inputs, case.options), right)
    assert turned.stride(-1) != 1 and torch.equal(attention(turned, kv, inputs, case.options), right)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [((66, 2), (8, 8), torch.float32), ((2, 1), (520, 8), torch.float32), ((2, 1), (8, 520), torch.float32),
     ((2, 1), (8, 8), torch.float64), ((2, 1), (8, 8), torch.bfloat16)],
)  # fmt: skip
def test_what_the_kernel_cannot_do_goes_to_torch_operators(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, attention: CpuAttention
) -> None:
    torch.manual_seed(0)
    store = KVStore([LayerSpec(heads[1], *dims, dtype, CPU)], 5, 4)
    kv, inputs = store.kv[0], AttentionInputs.build([([3, 1, 5], 2, 8), ([2], 1, 1)], 4, CPU)
    slots = torch.tensor([12, 13, 14, 15, 4, 5, 6, 7, 20, 21, 8, 9])
    keys, values = (torch.randn(12, heads[1], dim, dtype=dtype) for dim in dims)
    attention.write(kv, keys, values, slots)
    assert torch.equal(kv.gather_slots(slots)[0], keys) and torch.equal(kv.gather_slots(slots)[1], values)
    query = torch.randn(9, heads[0], dims[0], dtype=dtype)
    assert not attention.fits(query, kv)
    got = attention(query, kv, inputs, AttentionOptions(0.2))
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        got, attention_naive(query, kv, inputs, AttentionOptions(0.2)), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("name", NAMES)
def test_written_views_are_what_the_pool_itself_writes(name: str, attention: CpuAttention) -> None:
    torch.manual_seed(1)
    spec = LayerSpec(2, 20, 12, torch.float32, CPU).stored_as(name)
    joint, turned = torch.randn(9, 6 * 20), torch.randn(2, 9, 12)
    keys, values = joint.view(9, 6, 20)[:, 3:5], joint[:, 7:31].view(9, 2, 12)
    slots = torch.randperm(24)[:9] + 4
    for k, v in ((keys, values), (keys, turned.transpose(0, 1)), (keys[::2], values[::2]), (keys[:0], values[:0])):
        ours, theirs = (KVStore([spec], 6, 4) for _ in range(2))
        attention.write(ours.kv[0], k, v, slots[: len(k)])
        theirs.kv[0].write(k, v, slots[: len(k)])
        for one, two in zip(ours.pools, theirs.pools, strict=True):
            assert torch.equal(one.float(), two.float())
            assert len(k) == 0 or one.float().any()


@pytest.mark.parametrize("name", NAMES)
def test_states_that_do_not_fit_the_pool_are_refused(name: str, attention: CpuAttention) -> None:
    """Not written over the tokens beside theirs."""
    kv = KVStore([LayerSpec(2, 8, 8, torch.float32, CPU).stored_as(name)], 3, 4).kv[0]
    right, slots = torch.ones(2, 2, 8), torch.tensor([4, 5])
    for wrong in (torch.ones(2, 2, 12), torch.ones(2, 3, 8), torch.ones(3, 2, 8)):
        for keys, values in ((wrong, right), (right, wrong)):
            with pytest.raises((RuntimeError, IndexError)):
                attention.write(kv, keys, values, slots)
    others = [*range(4), *range(6, 16)]
    assert all(pool.flatten(0, 1)[others].float().eq(0).all() for pool in (kv.keys.float(), kv.values.float()))
