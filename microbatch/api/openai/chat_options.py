"""How a request wants its conversation rendered."""

from __future__ import annotations

from microbatch.api.openai.answer_form import AnswerForm
from microbatch.api.openai.schema import ChatRequest
from microbatch.core.chat import ChatOptions
from microbatch.errors import InvalidRequestError


def chat_options(body: ChatRequest, form: AnswerForm) -> ChatOptions:
    """The options of a request. Raises ``InvalidRequestError``."""
    continues = bool(body.continue_final_message)
    if continues:
        _check_continued(body, form)
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None and "reasoning_effort" in variables:
        raise InvalidRequestError("reasoning_effort is given twice", param="chat_template_kwargs.reasoning_effort")
    return ChatOptions(
        tools=form.use.tools,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        reasoning_effort=body.reasoning_effort,
        variables=variables,
        answer_prefix=form.prefix,
    )


def _check_continued(body: ChatRequest, form: AnswerForm) -> None:
    last = body.messages[-1]
    if body.add_generation_prompt:
        raise _error("continue_final_message and add_generation_prompt cannot both be true")
    if last.role != "assistant":
        raise _error(f"continue_final_message needs a last message of the assistant, not of {last.role[:20]}")
    if last.tool_calls:
        raise _error("continue_final_message cannot go on behind tool calls")
    if form.use.forced:
        raise _error("continue_final_message cannot go with a tool_choice that forces a call")


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="continue_final_message")
