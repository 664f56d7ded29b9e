"""Block tables that last from step to step."""

from __future__ import annotations

from hypothesis import given, strategies as st

from microbatch_kernels.block_rows import BlockRows

TABLES = st.lists(st.lists(st.integers(1, 999), min_size=1, max_size=9).map(tuple), max_size=5)


@given(st.lists(TABLES, max_size=6), st.data())
def test_rows_are_the_tables_padded_with_zeros(batches: list[list[tuple[int, ...]]], data: st.DataObject) -> None:
    rows = BlockRows()
    for tables in batches:
        width = data.draw(st.integers(0, max(map(len, tables), default=0)))
        for _ in range(2):  # the second time nothing is read
            found = rows.fill(tables, width).tolist()
            assert found == [[*table[:width], *[0] * (width - len(table))] for table in tables]


def test_a_table_is_read_once() -> None:
    class Counted(tuple[int, ...]):
        reads = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            Counted.reads += 1
            return super().__getitem__(key)

    rows, table = BlockRows(), Counted((1, 2, 3))
    for width in (2, 3, 1):
        assert rows.fill([table], width).tolist() == [[1, 2, 3][:width]]
    assert Counted.reads == 1
