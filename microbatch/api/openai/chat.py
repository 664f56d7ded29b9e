"""``POST /v1/chat/completions``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from microbatch.api.health import check_accepting
from microbatch.api.openai.answer_form import AnswerForm, answer_form
from microbatch.api.openai.body import parse_body
from microbatch.api.openai.chat_options import chat_options
from microbatch.api.openai.formats import check_form
from microbatch.api.openai.messages import read_messages
from microbatch.api.openai.models import ServedModels
from microbatch.api.openai.params import chat_params
from microbatch.api.openai.parts_render import PartsRenderer
from microbatch.api.openai.render import ChatRenderer, Envelope
from microbatch.api.openai.schema import UNSUPPORTED_CHAT, ChatRequest
from microbatch.api.openai.serve import serve
from microbatch.api.openai.tools import read_tools
from microbatch.api.ports import ServingEngine
from microbatch.core.request import SamplingParams


class ChatCompletions:
    """Answers a conversation."""

    def __init__(self, engine: ServingEngine, models: ServedModels) -> None:
        self._engine = engine
        self._models = models

    def routes(self) -> list[Route]:
        """The one route."""
        return [Route("/v1/chat/completions", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Check everything, render the conversation by the model's template, then submit."""
        check_accepting(self._engine)
        body = parse_body(await request.body(), ChatRequest, UNSUPPORTED_CHAT)
        model = self._models.resolve(body.model)
        form = answer_form(read_tools(body), self._engine.tokenizer)
        params = form.params(chat_params(body))
        request.app.state.limits.check(params)
        await check_form(self._engine, params, body)
        encoded = await self._engine.encode_chat(read_messages(body.messages), chat_options(body, form))
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        envelope = Envelope("chatcmpl", "chat.completion", model, include_usage, self._engine.fingerprint)
        renderer = self._renderer(envelope, params, form)
        return await serve(request, self._engine, body, [encoded], params, renderer)

    def _renderer(self, envelope: Envelope, params: SamplingParams, form: AnswerForm) -> ChatRenderer:
        if form.parser is None:
            return ChatRenderer(envelope, self._engine.tokenizer, params)
        return PartsRenderer(envelope, self._engine.tokenizer, params, form)
