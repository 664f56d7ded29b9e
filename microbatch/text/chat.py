"""A conversation as one text, by the chat template of the model or of the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from microbatch.errors import InvalidRequestError, SetupError


def render_chat(raw: Any, messages: Sequence[dict[str, object]], template: str | None) -> str:
    """The text of a conversation with the generation prompt. ``raw`` is the transformers tokenizer.

    Raises ``InvalidRequestError`` when there is no template, or with the template's own message when it refuses.
    """
    if template is None and not raw.chat_template:
        raise InvalidRequestError(
            "this model has no chat template: start the server with --chat-template, or use /v1/completions",
            param="messages",
        )
    try:
        rendered = raw.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program: what it raises on a conversation is its answer to it
        reason = str(error) or type(error).__name__
        raise InvalidRequestError(
            f"the chat template refused the messages: {reason[:500]}", param="messages"
        ) from error
    return str(rendered)


def check_template(raw: Any, template: str) -> None:
    """Raise ``SetupError`` when a template given by the operator does not even parse."""
    from jinja2 import TemplateSyntaxError

    try:
        raw.apply_chat_template([{"role": "user", "content": "Hi"}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise SetupError(f"--chat-template is not valid: line {error.lineno}: {error.message}") from error
    except Exception:  # it parses; whether it likes this conversation is another matter
        return
