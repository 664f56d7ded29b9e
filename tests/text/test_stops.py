"""Stop texts: the text before the earliest one, whatever the pieces it comes in."""

from __future__ import annotations

from hypothesis import given, strategies as st

from microbatch.text.stops import StopFilter

SMALL = st.text(alphabet="ab ", max_size=30)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """What is given out for each piece and at the end, and whether a stop was found."""
    stop_filter = StopFilter(stops)
    given_out = [stop_filter.push(piece) for piece in pieces]
    given_out.append(stop_filter.finish())
    return given_out, stop_filter.stopped


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    found = [text.index(stop) for stop in stops if stop in text]
    return (text[: min(found)], True) if found else (text, False)


@given(
    st.lists(st.text(alphabet="ab ", min_size=1, max_size=6), max_size=4),
    st.lists(st.text(alphabet="ab ", max_size=5), max_size=12),
)
def test_text_before_the_earliest_match_whatever_the_pieces(stops: list[str], pieces: list[str]) -> None:
    given_out, stopped = run(stops, pieces)
    assert ("".join(given_out), stopped) == expected(stops, "".join(pieces))


@given(
    st.lists(st.text(alphabet="ab ", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.text(alphabet="ab ", max_size=5), max_size=12),
)
def test_no_more_is_held_back_than_could_begin_a_stop(stops: list[str], pieces: list[str]) -> None:
    stop_filter = StopFilter(stops)
    text = given_out = ""
    for piece in pieces:
        text += piece
        given_out += stop_filter.push(piece)
        if stop_filter.stopped:
            break
        held = text[len(given_out) :]
        assert text.startswith(given_out)
        assert not held or any(held[: len(stop)] == stop[: len(held)] for stop in stops)


def test_pieces_pass_at_once_without_stops() -> None:
    assert run([], ["a", "", "bc"]) == (["a", "", "bc", ""], False)


def test_a_possible_beginning_waits_and_is_released_when_it_fails() -> None:
    assert run(["END"], ["x", "E", "N", "x", "EN"]) == (["x", "", "", "ENx", "", "EN"], False)


def test_nothing_follows_a_stop() -> None:
    assert run(["b"], ["abc", "a", "b"]) == (["a", "", "", ""], True)


def test_an_earlier_beginning_may_still_win_over_a_found_stop() -> None:
    assert run(["abcd", "c"], ["a", "b", "c", "d"]) == (["", "", "", "", ""], True)
    assert run(["abcd", "c"], ["a", "b", "c", "x"]) == (["", "", "", "ab", ""], True)
    assert run(["abcd", "c"], ["a", "b", "c"]) == (["", "", "", "ab"], True)


def test_a_long_repetitive_stop_costs_no_more_per_character() -> None:
    steps = 0

    class Counting(str):
        def __getitem__(self, key: object) -> str:
            nonlocal steps
            steps += 1
            return str.__getitem__(self, key)  # type: ignore[index]

    stop_filter = StopFilter(["a" * 500 + "b"])
    stop_filter._stops = (Counting(stop_filter._stops[0]),)
    assert "".join(stop_filter.push("a") for _ in range(2000)) == "a" * 1500
    assert steps <= 3 * 2000
