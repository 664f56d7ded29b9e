"""Every error that microbatch raises on purpose.

Each class carries the HTTP ``status``, the ``type`` and the ``code`` of its answer, so that the API layer maps errors
and nothing else knows HTTP:

    MicrobatchError                      500 internal_error
      + InvalidRequestError              400 invalid_request_error
        - ContextLengthError             400 invalid_request_error, code context_length_exceeded
        - UnsupportedError               400 invalid_request_error, code unsupported_value
      + AuthenticationError              401 authentication_error, code invalid_api_key
      + NotFoundError                    404 not_found_error
        - ModelNotFoundError             404 not_found_error, code model_not_found
      + PayloadTooLargeError             413 invalid_request_error, code payload_too_large
      + QueueFullError                   429 rate_limit_error, code queue_full (retry_after)
      + RateLimitError                   429 rate_limit_error, code rate_limit_exceeded (retry_after)
      + UnavailableError                 503 service_unavailable
        - DrainingError                  503 service_unavailable, code draining
        - EngineDeadError                503 service_unavailable, code engine_dead
        - OutOfMemoryError               503 service_unavailable, code out_of_memory
      + DeadlineError                    504 timeout_error, code request_timeout
        - QueueDeadlineError             503 timeout_error, code queue_timeout (retry_after)
      + ExecutionError                   500 internal_error, code execution_failed
      + SetupError                       (never over HTTP) a wrong flag, a missing model, a taken port
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AuthenticationError",
    "ContextLengthError",
    "DeadlineError",
    "DrainingError",
    "EngineDeadError",
    "ExecutionError",
    "InvalidRequestError",
    "MicrobatchError",
    "ModelNotFoundError",
    "NotFoundError",
    "OutOfMemoryError",
    "PayloadTooLargeError",
    "QueueDeadlineError",
    "QueueFullError",
    "RateLimitError",
    "SetupError",
    "UnavailableError",
    "UnsupportedError",
]


class MicrobatchError(Exception):
    """Base class. ``param`` names the request field at fault; ``retry_after`` is in seconds."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        if code is not None:
            self.code = code


class InvalidRequestError(MicrobatchError):
    """The request itself is wrong; sending it again cannot help."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for one token."""

    code = "context_length_exceeded"


class UnsupportedError(InvalidRequestError):
    """A valid value of the API that this server does not implement: refused by name, never ignored."""

    code = "unsupported_value"


class AuthenticationError(MicrobatchError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(MicrobatchError):
    """No such path or object."""

    status = 404
    type = "not_found_error"


class ModelNotFoundError(NotFoundError):
    """A model name that is not served."""

    code = "model_not_found"


class PayloadTooLargeError(MicrobatchError):
    """The body is over the limit."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class QueueFullError(MicrobatchError):
    """Refused at the door: the bounded inbox has no place."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class RateLimitError(MicrobatchError):
    """The client has had its requests or tokens of this minute."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class UnavailableError(MicrobatchError):
    """The server cannot take work now."""

    status = 503
    type = "service_unavailable"


class DrainingError(UnavailableError):
    """The server is shutting down: running requests finish, new ones are refused."""

    code = "draining"


class EngineDeadError(UnavailableError):
    """The engine task has ended; only a restart helps."""

    code = "engine_dead"


class OutOfMemoryError(UnavailableError):
    """The device had no memory for the step, even for one sequence."""

    code = "out_of_memory"


class DeadlineError(MicrobatchError):
    """The request's own time is over."""

    status = 504
    type = "timeout_error"
    code = "request_timeout"


class QueueDeadlineError(DeadlineError):
    """The request waited longer than ``--queue-timeout-s`` without being scheduled."""

    status = 503
    code = "queue_timeout"


class ExecutionError(MicrobatchError):
    """The model failed on this request (an exception in the step, or logits that are not numbers)."""

    code = "execution_failed"


class SetupError(MicrobatchError):
    """Start-up cannot go on: the message is one line that says what, why and what to do."""

    code = "setup_failed"
