"""The form of a chat answer: whether a parser reads it, and what it is held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from microbatch.api.openai.tools import ToolUse
from microbatch.core.ports import Tokenizer
from microbatch.core.request import SamplingParams
from microbatch.core.structured import StructuredOutput
from microbatch.errors import UnsupportedError
from microbatch.text.tool_calls.choosing import NONE, PARSERS
from microbatch.text.tool_calls.events import Content, Event
from microbatch.text.tool_calls.grammar import force_calls, keep_strict, needs_constraint, quoted
from microbatch.text.tool_calls.parser import ToolParser


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """``parser`` None: the text is the content. The model goes on behind ``prefix``, which begins a call."""

    use: ToolUse
    parser: type[ToolParser] | None = None
    prefix: str = ""
    constraint: StructuredOutput | None = None

    def params(self, params: SamplingParams) -> SamplingParams:
        """The parameters of the request with what this form adds. Raises ``UnsupportedError`` when both want a form."""
        if self.use.tools and params.structured_output is not None:
            raise UnsupportedError(
                "a response format together with tools is not supported by this server: use tool_choice 'none'",
                param="response_format",
            )
        shown = self.parser.special if self.parser is not None else ()
        return replace(params, shown_tokens=shown, structured_output=self.constraint or params.structured_output)


def answer_form(use: ToolUse, tokenizer: Tokenizer) -> AnswerForm:
    """The form for a request. Raises ``UnsupportedError`` when the model has none for calls of tools."""
    name = tokenizer.tool_parser
    if name == NONE:
        if use.tools:
            raise UnsupportedError(
                "the form in which this model calls tools is not known: start the server with --tool-parser",
                param="tools",
            )
        return AnswerForm(use)
    parser = PARSERS[name]
    if not use.tools:
        return AnswerForm(use, parser if parser.always else None)

    def terminal(marker: str) -> str:
        """A marker that is one token is that token in a grammar, where text is never a special token."""
        ids = tokenizer.encode(marker, add_special_tokens=False)
        return f"<[{ids[0]}]>" if len(ids) == 1 and tokenizer.token_text(ids[0])[0] == marker else quoted(marker)

    functions: tuple[Mapping[str, Any], ...] = use.functions
    if use.forced:
        forced = force_calls(name, functions, use.parallel, terminal)
        return AnswerForm(use, parser, forced.prefix, forced.form)
    return AnswerForm(
        use, parser, constraint=keep_strict(name, functions, terminal) if needs_constraint(functions) else None
    )


class AnswerReader:
    """The parts of one choice while its text comes. A forced answer has calls only, and without ``parallel`` only the
    first call counts."""

    def __init__(self, form: AnswerForm) -> None:
        assert form.parser is not None
        self._parser = form.parser([function["name"] for function in form.use.functions])
        self._parser.push(form.prefix)
        self._use = form.use

    def push(self, text: str) -> list[Event]:
        """What is certain after this text."""
        return self._wanted(self._parser.push(text))

    def finish(self) -> list[Event]:
        """The rest."""
        return self._wanted(self._parser.finish())

    def _wanted(self, events: list[Event]) -> list[Event]:
        if self._use.forced:
            events = [event for event in events if not isinstance(event, Content)]
        if not self._use.parallel:
            events = [event for event in events if not getattr(event, "index", 0)]
        return events
