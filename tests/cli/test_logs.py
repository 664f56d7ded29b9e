"""The server's log: one line an event, nothing forged, no key shown."""

from __future__ import annotations

import io
import json
import logging
import math
import warnings

import pytest

from microbatch.logs import configure_logging, escape

NASTY = "a\nERROR fake\r\x1b[31m\x00\u2028\u202e\x85b"


def lines(log: io.StringIO) -> list[str]:
    return log.getvalue().splitlines()


def test_one_line_with_time_level_and_logger(log: io.StringIO) -> None:
    configure_logging(stream=log)
    logging.getLogger("microbatch.engine").info("ready %s", "now")
    (line,) = lines(log)
    stamp, _, rest = line.partition(" ")
    assert rest == "INFO microbatch.engine: ready now"
    assert len(stamp) == len("2026-01-31T12:00:00.123Z") and stamp.endswith("Z")


@pytest.mark.parametrize("as_json", [False, True])
def test_an_event_cannot_forge_a_line(log: io.StringIO, as_json: bool) -> None:
    configure_logging(stream=log, as_json=as_json)
    logging.getLogger("microbatch").warning("got %s", NASTY)
    (line,) = lines(log)
    assert line.isprintable()


@pytest.mark.parametrize("as_json", [False, True])
def test_no_field_of_an_event_can_forge_a_line(log: io.StringIO, as_json: bool) -> None:
    class Odd:
        def __str__(self) -> str:
            return NASTY

    configure_logging(stream=log, as_json=as_json)
    logging.getLogger("microbatch").warning("args %s", NASTY, extra={NASTY: NASTY, "odd": Odd(), "path": "/" + NASTY})
    logging.getLogger(f"microbatch.{NASTY}").error(NASTY, exc_info=ValueError(NASTY), stack_info=True)
    first, second = lines(log)
    assert first.isprintable() and second.isprintable()
    if as_json:
        event, failure = json.loads(first), json.loads(second)
        assert event["message"] == f"args {NASTY}"
        assert event[NASTY] == event["odd"] == NASTY and event["path"] == f"/{NASTY}"
        assert failure["logger"] == f"microbatch.{NASTY}" and failure["message"] == NASTY
        assert failure["exception"] == f"ValueError: {NASTY}"


def test_every_line_is_json_also_of_numbers_that_json_does_not_have(log: io.StringIO) -> None:
    def strict(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    configure_logging(stream=log, as_json=True)
    numbers = {"a": math.nan, "b": -math.inf, "c": 1.5, "d": True, "e": None, "f": [1]}
    logging.getLogger("microbatch").warning("numbers", extra=numbers)
    event = json.loads(lines(log)[0], parse_constant=strict)
    assert {key: event[key] for key in numbers} == {"a": "nan", "b": "-inf", "c": 1.5, "d": True, "e": None, "f": "[1]"}


def test_escape_leaves_text_of_any_language_alone() -> None:
    assert escape("né 中文 😀 \\n") == "né 中文 😀 \\n"
    assert escape("\n\x1b\ud800") == r"\n\x1b\ud800"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_traceback_stays_on_its_line(log: io.StringIO, as_json: bool) -> None:
    configure_logging(stream=log, as_json=as_json)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("microbatch").exception("failed")
    (line,) = lines(log)
    assert "ValueError: two" in line and "test_logs.py" in line


def test_json_has_the_fields_and_the_extras(log: io.StringIO) -> None:
    configure_logging(stream=log, as_json=True)
    logging.getLogger("microbatch.api").info("done", extra={"request_id": "r1", "tokens": 3, "path": "/x?api_key=sk-1"})
    event = json.loads(lines(log)[0])
    assert event.pop("time").endswith("Z")
    assert event == {
        "level": "info",
        "logger": "microbatch.api",
        "message": "done",
        "request_id": "r1",
        "tokens": 3,
        "path": "/x?api_key=***",
    }


def test_an_extra_cannot_replace_the_level(log: io.StringIO) -> None:
    configure_logging(stream=log, as_json=True)
    logging.getLogger("microbatch").error("bad", extra={"level": "info", "time": "then"})
    event = json.loads(lines(log)[0])
    assert event["level"] == "error" and event["time"] != "then"


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "key my.key+1 was sent",
        "Authorization: Bearer sk-secret",
        "'authorization': 'bearer sk-secret'",
        "GET /v1/models?api_key=sk-secret&x=1",
        '{"api-key": "sk-secret"}',
        "longer: my.key+1-and-more",
    ],
)
def test_keys_are_hidden(log: io.StringIO, text: str, as_json: bool) -> None:
    configure_logging(stream=log, as_json=as_json, secrets=["my.key+1", "my.key+1-and-more", ""])
    logging.getLogger("microbatch").warning("%s", text)
    logging.getLogger("microbatch").error("again", extra={"header": text}, exc_info=RuntimeError(text))
    written = log.getvalue()
    assert "***" in written
    assert "sk-secret" not in written and "my.key" not in written and "and-more" not in written


def test_other_libraries_are_heard_from_a_warning_on(log: io.StringIO) -> None:
    configure_logging("debug", stream=log)
    logging.getLogger("httpx").info("chatter")
    logging.getLogger("httpx").warning("trouble")
    logging.getLogger("microbatch.x").debug("detail")
    assert [line.split(" ", 1)[1] for line in lines(log)] == ["WARNING httpx: trouble", "DEBUG microbatch.x: detail"]


def test_a_second_call_replaces_the_first(log: io.StringIO) -> None:
    configure_logging(stream=io.StringIO())
    configure_logging("error", stream=log)
    logging.getLogger("microbatch").warning("no")
    logging.getLogger("microbatch").error("yes")
    assert len(lines(log)) == 1


def test_warnings_of_python_go_to_the_log(log: io.StringIO) -> None:
    configure_logging(stream=log)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old\nway", DeprecationWarning, stacklevel=1)
    (line,) = lines(log)
    assert "WARNING py.warnings" in line and r"old\nway" in line
