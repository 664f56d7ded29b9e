"""The prefix cache: which block holds the K/V of which tokens after which prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def block_hash(parent_hash: int, token_ids: tuple[int, ...], salt: str) -> int:
    """Hash of a full block, chained on its prefix. It only finds candidates: a hit is decided by comparing."""
    return hash((parent_hash, token_ids, salt))


class PrefixNode:
    """The content of one full block: its tokens after the prefix ``parent``, under a salt.

    Nodes in an index are unique, so equal content there means the same node, and to compare the parent's identity is to
    compare the whole prefix. ``block_ids`` are the blocks that hold this content, a matched one first; ``num_pins``
    counts the pinned prefixes that it is part of.
    """

    __slots__ = ("parent", "token_ids", "salt", "block_ids", "num_pins", "_hash")

    def __init__(self, parent: PrefixNode | None, token_ids: tuple[int, ...], salt: str) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.salt = salt
        self.block_ids: list[int] = []
        self.num_pins = 0
        self._hash = block_hash(0 if parent is None else hash(parent), token_ids, salt)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PrefixNode)
            and self.parent is other.parent
            and self.token_ids == other.token_ids
            and self.salt == other.salt
        )

    def __repr__(self) -> str:
        return f"<PrefixNode blocks={self.block_ids} pins={self.num_pins}>"


class PrefixCache:
    """Index of full blocks whose K/V is written. It knows contents, not references: its owner tells it what is lost.

    Sequences that compute the same block at the same time make several blocks of one content; all are kept and the
    first is the one that is matched.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._nodes: dict[PrefixNode, PrefixNode] = {}
        self._node_of: dict[int, PrefixNode] = {}

    def match(self, token_ids: Sequence[int], salt: str = "", *, pinned_only: bool = False) -> list[PrefixNode]:
        """The nodes of the longest cached prefix that leaves at least one token to compute. Changes nothing."""
        nodes = []
        for node in self._walk(token_ids, salt, (len(token_ids) - 1) // self._block_size):
            if pinned_only and node.num_pins == 0:
                break
            nodes.append(node)
        return nodes

    def find(self, token_ids: Sequence[int], salt: str = "") -> list[PrefixNode]:
        """The nodes of all full blocks of a text, the last one too; ``LookupError`` when one of them is not cached."""
        count = len(token_ids) // self._block_size
        nodes = list(self._walk(token_ids, salt, count))
        if len(nodes) < count:
            raise LookupError(f"only {len(nodes)} of the prefix's {count} full blocks are cached")
        return nodes

    def _walk(self, token_ids: Sequence[int], salt: str, count: int) -> Iterator[PrefixNode]:
        node: PrefixNode | None = None
        for start in range(0, count * self._block_size, self._block_size):
            node = self._nodes.get(PrefixNode(node, tuple(token_ids[start : start + self._block_size]), salt))
            if node is None:
                return
            yield node

    def insert(self, parent: PrefixNode | None, token_ids: tuple[int, ...], salt: str, block_id: int) -> PrefixNode:
        """A block holds these tokens after ``parent`` (None: at the start). Its node, with any other block of the same.

        Raises ``ValueError`` when the block is known to hold something else.
        """
        node = PrefixNode(parent, token_ids, salt)
        node = self._nodes.get(node, node)
        if self._node_of.get(block_id, node) is not node:
            raise ValueError(f"block {block_id} is cached with other tokens")
        self._nodes[node] = node
        if block_id not in self._node_of:
            self._node_of[block_id] = node
            node.block_ids.append(block_id)
        return node

    def node(self, block_id: int) -> PrefixNode:
        """What a cached block holds; ``KeyError`` when it is not cached."""
        return self._node_of[block_id]

    def drop(self, block_id: int) -> None:
        """Forget a cached block. The content goes with its last block."""
        node = self._node_of.pop(block_id)
        node.block_ids.remove(block_id)
        if not node.block_ids:
            del self._nodes[node]

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._node_of

    def __len__(self) -> int:
        """Blocks in the index."""
        return len(self._node_of)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when blocks and nodes disagree or a node's prefix is gone."""
        for block_id, node in self._node_of.items():
            assert self._nodes.get(node) is node, f"block {block_id} has a node outside the index"
        listed = sorted(block_id for node in self._nodes for block_id in node.block_ids)
        assert listed == sorted(self._node_of), f"blocks of nodes {listed}, nodes of blocks {sorted(self._node_of)}"
        for node in self._nodes:
            assert node.block_ids, "a node without a block"
            assert len(node.token_ids) == self._block_size, f"{node!r} is not a full block"
            parent = node.parent
            assert parent is None or self._nodes.get(parent) is parent, f"{node!r} can no longer be reached"

    def __repr__(self) -> str:
        return f"<PrefixCache blocks={len(self._node_of)} contents={len(self._nodes)}>"
