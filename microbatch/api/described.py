"""What each route does, for ``/openapi.json``. A new route needs a line here; a test says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from microbatch.api.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

ERROR_STATUSES: Final[Mapping[int, str]] = {
    400: "The request is wrong; the message says what and where.",
    401: "No key, or a wrong one.",
    404: "No such model or object.",
    413: "The body is over the limit.",
    429: "Too much at once; Retry-After says when to come again.",
    500: "A fault of the server.",
    503: "The server is starting, ending, or has failed.",
    504: "The request's own time was over.",
}
_JSON: Final = ("application/json",)
_STREAM: Final = ("application/json", "text/event-stream")
_WORK: Final = (400, 404, 413, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True)
class Description:
    """``body`` is the type of a JSON body; ``failures`` the statuses with an error body. ``not_ready``: 503 has the
    body of 200."""

    summary: str
    answer: str
    media_types: tuple[str, ...] = _JSON
    body: type[Struct] | None = None
    failures: tuple[int, ...] = ()
    path_parameter: str = ""
    not_ready: bool = False


#: By the pattern of the route.
DESCRIPTIONS: Final[Mapping[str, Description]] = {
    "/health": Description("Is the process worth keeping?", "The state of the engine.", not_ready=True),
    "/ready": Description("Does it accept requests now?", "The state of the engine.", not_ready=True),
    "/metrics": Description("Prometheus metrics.", "All metrics as text.", ("text/plain",)),
    "/openapi.json": Description("This document.", "OpenAPI 3.1."),
    "/v1/models": Description("The names that the model is served under.", "A list of models.", failures=(503,)),
    "/v1/models/{id:path}": Description("One of the names.", "A model.", failures=(404, 503), path_parameter="id"),
    "/v1/completions": Description(
        "Complete prompts.", "The answer, or a stream of its chunks.", _STREAM, CompletionRequest, _WORK
    ),
    "/tokenize": Description(
        "Token ids of a text or a conversation.", "The ids.", body=TokenizeRequest, failures=(400, 404, 413, 503)
    ),
    "/detokenize": Description(
        "Text of token ids.", "The text.", body=DetokenizeRequest, failures=(400, 404, 413, 503)
    ),
    "/v1/chat/completions": Description(
        "Answer a conversation.", "The answer, or a stream of its chunks.", _STREAM, ChatRequest, _WORK
    ),
}
