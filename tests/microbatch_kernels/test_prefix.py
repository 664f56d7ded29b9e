"""The index of contents: what matches what."""

from __future__ import annotations

import pytest

from microbatch_kernels import prefix
from microbatch_kernels.prefix import PrefixCache, PrefixNode


def chain(cache: PrefixCache, token_ids: list[int], block_ids: list[int], salt: str = "") -> list[PrefixNode]:
    """Insert the full blocks of a text, two tokens each."""
    nodes: list[PrefixNode] = []
    for index, block_id in enumerate(block_ids):
        parent = nodes[-1] if nodes else None
        nodes.append(cache.insert(parent, tuple(token_ids[2 * index : 2 * index + 2]), salt, block_id))
        cache.check_integrity()
    return nodes


def matched(cache: PrefixCache, token_ids: list[int], salt: str = "") -> list[int]:
    """Block ids of a match."""
    return [node.block_ids[0] for node in cache.match(token_ids, salt)]


@pytest.mark.parametrize(
    "token_ids, block_ids",
    [
        ([], []),
        ([1], []),
        ([1, 2], []),
        ([1, 2, 3], [5]),
        ([1, 2, 3, 4], [5]),
        ([1, 2, 3, 4, 5], [5, 6]),
        ([1, 2, 9, 4, 5], [5]),
        ([9, 2, 3, 4, 5], []),
    ],
)
def test_match_is_the_longest_prefix_that_leaves_a_token(token_ids: list[int], block_ids: list[int]) -> None:
    cache = PrefixCache(2)
    chain(cache, [1, 2, 3, 4], [5, 6])
    assert matched(cache, token_ids) == block_ids


def test_the_same_tokens_after_another_prefix_are_another_content() -> None:
    cache = PrefixCache(2)
    chain(cache, [1, 2, 7, 8], [1, 2])
    chain(cache, [3, 4, 7, 8], [3, 4])
    assert matched(cache, [1, 2, 7, 8, 0]) == [1, 2]
    assert matched(cache, [3, 4, 7, 8, 0]) == [3, 4]
    assert matched(cache, [7, 8, 0]) == []


def test_a_salt_isolates() -> None:
    cache = PrefixCache(2)
    chain(cache, [1, 2], [1], salt="a")
    assert matched(cache, [1, 2, 3]) == []
    assert matched(cache, [1, 2, 3], "b") == []
    assert matched(cache, [1, 2, 3], "a") == [1]


@pytest.mark.parametrize("constant", [True, False])
def test_equality_decides_not_the_hash(monkeypatch: pytest.MonkeyPatch, constant: bool) -> None:
    monkeypatch.setattr(prefix, "block_hash", lambda parent, token_ids, salt: 7 if constant else sum(token_ids) % 2)
    cache = PrefixCache(2)
    chain(cache, [1, 2, 3, 4], [1, 2])
    chain(cache, [2, 1, 3, 4], [3, 4])
    chain(cache, [1, 2, 3, 4], [5, 6], salt="a")
    assert matched(cache, [1, 2, 3, 4, 0]) == [1, 2]
    assert matched(cache, [2, 1, 3, 4, 0]) == [3, 4]
    assert matched(cache, [1, 2, 3, 4, 0], "a") == [5, 6]
    assert matched(cache, [3, 4, 1, 2, 0]) == []
    assert matched(cache, [1, 2, 4, 3, 0]) == [1]


def test_find_wants_every_full_block() -> None:
    cache = PrefixCache(2)
    nodes = chain(cache, [1, 2, 3, 4], [5, 6])
    assert cache.find([1, 2, 3, 4]) == nodes
    assert cache.find([1, 2, 3, 4, 5]) == nodes
    assert cache.find([1]) == []
    with pytest.raises(LookupError, match="only 2 of the prefix's 3 full blocks are cached"):
        cache.find([1, 2, 3, 4, 5, 6])


def test_only_pinned_contents_when_asked() -> None:
    cache = PrefixCache(2)
    first, _ = chain(cache, [1, 2, 3, 4], [5, 6])
    first.num_pins = 1
    assert cache.match([1, 2, 3, 4, 5], pinned_only=True) == [first]


def test_blocks_of_one_content_stand_in_for_each_other() -> None:
    cache = PrefixCache(2)
    first = chain(cache, [1, 2], [1])[0]
    assert cache.insert(None, (1, 2), "", 2) is first
    assert cache.insert(None, (1, 2), "", 2) is first
    assert first.block_ids == [1, 2]
    assert len(cache) == 2
    assert repr(cache) == "<PrefixCache blocks=2 contents=1>"
    cache.drop(1)
    assert matched(cache, [1, 2, 3]) == [2]
    assert 1 not in cache
    cache.drop(2)
    assert matched(cache, [1, 2, 3]) == []
    assert repr(cache) == "<PrefixCache blocks=0 contents=0>"
    cache.check_integrity()


def test_a_block_holds_one_content() -> None:
    cache = PrefixCache(2)
    node = chain(cache, [1, 2], [1])[0]
    with pytest.raises(ValueError, match="block 1 is cached with other tokens"):
        cache.insert(None, (1, 3), "", 1)
    assert cache.node(1) is node
    cache.check_integrity()
    with pytest.raises(KeyError):
        cache.node(2)


def test_check_integrity_sees_a_prefix_that_is_gone() -> None:
    cache = PrefixCache(2)
    chain(cache, [1, 2, 3, 4], [1, 2])
    cache.drop(1)
    with pytest.raises(AssertionError, match="can no longer be reached"):
        cache.check_integrity()


def test_a_node_is_compared_with_nodes_only() -> None:
    node = PrefixNode(None, (1, 2), "")
    assert node == PrefixNode(None, (1, 2), "")
    assert node != (None, (1, 2), "")
    assert repr(node) == "<PrefixNode blocks=[] pins=0>"


def test_a_very_long_chain_is_let_go_without_recursion() -> None:
    cache = PrefixCache(1)
    node: PrefixNode | None = None
    for block_id in range(1, 200_001):
        node = cache.insert(node, (block_id % 7,), "", block_id)
    del cache, node
