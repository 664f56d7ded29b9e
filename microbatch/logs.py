"""The server's log: one line an event, no control characters, no keys; text for people or JSON for machines."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterable
from typing import Any, Final, TextIO

#: What a line must not hold: C0, DEL, C1, line separators, direction overrides, surrogates that no encoding can write.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
#: Keys by the place they stand in, known or not.
_KEY_PLACES: Final = re.compile(r"(?i)(\bbearer\s+|\bapi[_-]?key[\"']?\s*[=:]\s*[\"']?)[^\s\"'&,;]+")
_HIDDEN: Final = "***"
#: What every record has; anything beside it came in by ``extra=``.
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}


def escape(text: str) -> str:
    r"""Control characters as ``\n``, ``\x1b``, ``\u202e``: the text can no longer end a line or colour a terminal."""
    return _UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


class Redactor:
    """Hides keys: the ones it was told, and whatever follows ``Bearer`` or ``api_key=``."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        longest_first = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        """``text`` with every key replaced."""
        text = _KEY_PLACES.sub(rf"\g<1>{_HIDDEN}", text)
        return self._known.sub(_HIDDEN, text) if self._known is not None else text


class LineFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO microbatch.engine: message``; a traceback follows on the same line, escaped."""

    def __init__(self, redact: Redactor) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._redact = redact

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """UTC with milliseconds, as everything that compares machines needs it."""
        return _utc(record.created)

    def format(self, record: logging.LogRecord) -> str:
        """One line without its end."""
        return escape(self._redact(super().format(record)))


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, exception if any, and the ``extra`` fields of the event."""

    def __init__(self, redact: Redactor) -> None:
        super().__init__()
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        """One line of ASCII without its end."""
        event: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._redact(record.getMessage()),
        }
        if record.exc_info:
            event["exception"] = self._redact(self.formatException(record.exc_info))
        extra = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        return json.dumps({**self._plain(extra), **event})

    def _plain(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Numbers and booleans as they are, all else as redacted text; so also numbers that JSON does not have."""
        return {key: value if _is_plain(value) else self._redact(str(value)) for key, value in fields.items()}


def _is_plain(value: object) -> bool:
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, (bool, int, type(None)))


def configure_logging(
    level: str = "info", *, as_json: bool = False, secrets: Iterable[str] = (), stream: TextIO | None = None
) -> None:
    """Set up the root logger of the process: for the server, never for the library. Writes to stderr by default.

    ``level`` is microbatch's and uvicorn's; of other libraries only warnings and worse are logged. ``secrets``: the API
    keys, hidden wherever they turn up. Calling it again replaces the former set-up.
    """
    redact = Redactor(secrets)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(redact) if as_json else LineFormatter(redact))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    for name in ("microbatch", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
