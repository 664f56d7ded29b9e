"""API keys by the names of the clients that have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from microbatch.errors import SetupError

_NAMED: Final = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64}):(?:\s+(?P<key>.*))?")


def add_key_file(keys: dict[str, str], text: str, path: str) -> None:
    """Add the keys of a file to ``keys``: a line is a key or ``name: key``. A key without a name is called by its place
    among all keys. Raises ``SetupError`` that never shows a key."""
    found = False
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        found = True
        named = _NAMED.fullmatch(line)
        name, key = (named["name"], named["key"] or "") if named else (f"key-{len(keys)}", line)
        if key in keys.values():
            continue
        if name in keys:
            raise SetupError(f"api_key_file {path}, line {number}: the name {name} is taken")
        keys[name] = key
    if not found:
        raise SetupError(f"api_key_file {path} holds no key")


def check_keys(keys: Mapping[str, str]) -> None:
    """Raise ``SetupError`` for a key that no header could carry."""
    if any(not key or not key.isprintable() or " " in key for key in keys.values()):
        raise SetupError("an API key must be of printable characters without spaces, and not empty")
