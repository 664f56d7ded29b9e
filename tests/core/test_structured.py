"""The form of an answer as a value."""

import pytest

from microbatch.core.structured import KINDS, StructuredOutput
from microbatch.errors import InvalidRequestError


def test_every_kind_takes_a_text_but_the_plain_object() -> None:
    for kind in KINDS:
        text = "" if kind == "json_object" else "x"
        assert StructuredOutput(kind, text).text == text  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "text"), [("xml", "x"), ("regex", ""), ("json_object", "{}")])
def test_a_form_that_says_nothing_or_too_much_is_refused(kind: str, text: str) -> None:
    with pytest.raises(InvalidRequestError):
        StructuredOutput(kind, text)  # type: ignore[arg-type]
