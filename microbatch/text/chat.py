"""A conversation as one text, by the chat template of the model or of the operator."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

from microbatch.core.chat import ChatOptions
from microbatch.errors import InvalidRequestError, SetupError, UnsupportedError
from microbatch.text.tool_calls.preamble import write_out

#: What the template gets from the server, besides the parameters of ``apply_chat_template`` and the special tokens.
_RESERVED: Final = frozenset({"messages", "conversations", "self"})


def render_chat(
    raw: Any,
    messages: Sequence[dict[str, object]],
    template: str | None,
    options: ChatOptions = ChatOptions(),
    tool_parser: str = "hermes",
) -> str:
    """The text of a conversation, by default with the generation prompt. ``raw`` is the transformers tokenizer.

    A template that has no place for tools gets them written out in the form of Hermes. Raises ``InvalidRequestError``
    when there is no template, or with the template's own message when it refuses.
    """
    source = template_source(raw, template, with_tools=bool(options.tools))
    if source is None:
        raise InvalidRequestError(
            "this model has no chat template: start the server with --chat-template, or use /v1/completions",
            param="messages",
        )
    variables = _variables(raw, source, options)
    tools: list[Mapping[str, Any]] | None = list(options.tools) or None
    conversation = list(messages)
    if tools and "tools" not in source:
        _check_hermes(tool_parser)
        conversation, tools = write_out(messages, tools), None
    elif "tool_calls" not in source and any(_about_tools(message) for message in messages):
        conversation = write_out(messages, ())
    try:
        rendered = raw.apply_chat_template(
            conversation,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **variables,
        )
    except Exception as error:  # a template is a program: what it raises on a conversation is its answer to it
        reason = str(error) or type(error).__name__
        raise InvalidRequestError(
            f"the chat template refused the messages: {reason[:500]}", param="messages"
        ) from error
    return f"{rendered}{options.answer_prefix}"


def template_source(raw: Any, template: str | None, with_tools: bool = True) -> str | None:
    """The template that renders conversations; a model may have one of its own for those with tools. None without."""
    if template is not None:
        return template
    templates = raw.chat_template
    if not isinstance(templates, dict):
        return templates or None
    return (templates.get("tool_use") if with_tools else None) or templates.get("default")


def check_template(raw: Any, template: str) -> None:
    """Raise ``SetupError`` when a template given by the operator does not even parse."""
    from jinja2 import TemplateSyntaxError

    try:
        raw.apply_chat_template([{"role": "user", "content": "Hi"}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise SetupError(f"--chat-template is not valid: line {error.lineno}: {error.message}") from error
    except Exception:  # it parses; whether it likes this conversation is another matter
        return


def _variables(raw: Any, source: str, options: ChatOptions) -> dict[str, Any]:
    """The client's variables, none of which may stand for what the server or the model gives."""
    own = _RESERVED.union(inspect.signature(raw.apply_chat_template).parameters, raw.SPECIAL_TOKENS_ATTRIBUTES)
    for name in options.variables:
        if name in own:
            where = f"chat_template_kwargs.{name}"
            raise InvalidRequestError(f"{where} is not the request's to set", param=where)
    if options.reasoning_effort is None:
        return dict(options.variables)
    if "reasoning_effort" not in source:
        raise UnsupportedError("the chat template of this model has no reasoning_effort", param="reasoning_effort")
    return {**options.variables, "reasoning_effort": options.reasoning_effort}


def _check_hermes(tool_parser: str) -> None:
    if tool_parser != "hermes":
        raise UnsupportedError(
            "the chat template of this model has no place for tools, and they can be written into the system prompt"
            f" only in the form of hermes, not of {tool_parser}: start the server with another --chat-template or"
            " --tool-parser",
            param="tools",
        )


def _about_tools(message: Mapping[str, object]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))
