"""Reads the README: its fenced blocks, command lines and requests; and makes the table of settings it must hold.

``python -m tests.readme`` puts that table between the two ``settings`` comments of the README.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from microbatch.settings import SETTINGS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


class Block(NamedTuple):
    """A fenced block: its language, its text and the line it begins at."""

    language: str
    text: str
    line: int


class Curl(NamedTuple):
    """A request as curl would send it."""

    method: str
    url: str
    headers: dict[str, str]
    body: str | None


def blocks(language: str) -> list[Block]:
    """The fenced blocks of one language."""
    text = README.read_text("utf-8") if README.exists() else ""
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], text[: m.start()].count("\n") + 1) for m in found if m[1] == language]


def commands() -> Iterator[list[str]]:
    """The words of every command line, with continued lines and quoted line breaks taken together."""
    for block in blocks("sh"):
        command = ""
        for line in block.text.replace("\\\n", " ").splitlines(keepends=True):
            command += line
            try:
                words = shlex.split(command, comments=True)
            except ValueError:  # a quotation is still open
                continue
            yield from split_words(words)
            command = ""
        assert not command, f"README.md:{block.line}: unfinished command {command!r}"


def split_words(words: list[str]) -> Iterator[list[str]]:
    """The commands of one line that are joined by an operator, without the variables set in front of each."""
    command: list[str] = []
    for word in (*words, ";"):
        if word in ("|", "&", "&&", "||", ";"):
            if command:
                yield command
            command = []
        elif command or not re.fullmatch(r"[A-Z_]+=.*", word):
            command.append(word)


def title(words: list[str]) -> str:
    """A command line as the name of a test."""
    return " ".join(" ".join(words).split())[:70]


def parse_curl(words: list[str]) -> Curl:
    """What curl would send for this command line."""
    method, url, body = "", "", None
    headers: dict[str, str] = {}
    rest = iter(words[1:])
    for word in rest:
        if word in ("-d", "--data", "--data-raw", "--json"):
            body = next(rest)
            kind = "application/json" if word == "--json" else "application/x-www-form-urlencoded"
            headers.setdefault("content-type", kind)
        elif word in ("-H", "--header"):
            name, _, value = next(rest).partition(":")
            headers[name.strip().lower()] = value.strip()
        elif word in ("-X", "--request"):
            method = next(rest)
        elif not word.startswith("-"):
            url = word if "://" in word else f"http://{word}"
    return Curl(method or ("GET" if body is None else "POST"), url, headers, body)


def settings_table() -> str:
    """The table that the README must hold, as Markdown."""
    rows = ["| setting | flag | default | what it is |", "|---|---|---|---|"]
    for row in SETTINGS.values():
        default = f"`{row.default_text}`" if row.default_text else "–"
        flag, text = (part.replace("|", "\\|") for part in (row.flag, row.help))
        rows.append(f"| `{row.name}` | `{flag}` | {default} | {text} |")
    return "\n".join(rows)


def commands_of(kind: str) -> list[list[str]]:
    """The command lines of one program, or of the scripts."""
    return [words for words in commands() if words[0].partition("/")[0] == kind]


def with_settings_table(text: str) -> str:
    """The README's text with the table of today; ``ValueError`` when it has no place for it."""
    before, begin, rest = text.partition("<!-- settings -->\n")
    _, end, after = rest.partition("<!-- /settings -->")
    if not (begin and end):
        raise ValueError("the README has no pair of settings comments")
    return f"{before}{begin}\n{settings_table()}\n\n{end}{after}"


if __name__ == "__main__":
    README.write_text(with_settings_table(README.read_text("utf-8")), "utf-8")
