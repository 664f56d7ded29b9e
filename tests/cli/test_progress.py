"""Long steps on the terminal."""

from __future__ import annotations

import io
import sys

import pytest

from microbatch.progress import PlainProgress, shown_progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_plain_lines_are_few() -> None:
    said: list[str] = []
    progress = PlainProgress(said.append)
    for done in range(0, 101):
        progress("downloading", done * 10**6, 100 * 10**6)
    progress("converting", 0, 0)
    progress("converting", 0, 0)
    progress("recording config.json", 817, 817)
    assert said == [
        "downloading: 25 of 100 MB",
        "downloading: 50 of 100 MB",
        "downloading: 75 of 100 MB",
        "downloading: 100 of 100 MB",
        "converting",
    ]


def test_no_terminal_means_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with shown_progress(said.append) as progress:
        progress("converting", 0, 0)
    assert said == ["converting"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, said = Terminal(), list[str]()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with shown_progress(said.append) as progress:
        progress("downloading", 5 * 10**6, 10 * 10**6)
        progress("downloading", 20 * 10**6, 10 * 10**6)
        progress("converting", 0, 0)
    assert "downloading" in terminal.getvalue() or "converting" in terminal.getvalue()
    assert said == []
