"""What form an answer must have, as a value: the executor only lets tokens through that keep to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from microbatch.errors import InvalidRequestError

Kind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]
KINDS: Final[tuple[str, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of an answer. ``text`` by ``kind``: the schema as JSON, the regular expression, the grammar, the
    choices as a JSON list of texts; empty for ``json_object``."""

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequestError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if bool(self.text) == (self.kind == "json_object"):
            raise InvalidRequestError(f"{self.kind} takes {'no text' if self.text else 'a text'}")
