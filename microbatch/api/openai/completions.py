"""``POST /v1/completions``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from microbatch.api.health import check_accepting
from microbatch.api.openai.best_of import widen
from microbatch.api.openai.body import parse_body
from microbatch.api.openai.formats import check_form
from microbatch.api.openai.models import ServedModels
from microbatch.api.openai.params import completion_params
from microbatch.api.openai.prompts import PromptRules, encode_prompts, read_prompts
from microbatch.api.openai.render import CompletionRenderer, Envelope
from microbatch.api.openai.schema import UNSUPPORTED_COMPLETION, CompletionRequest
from microbatch.api.openai.serve import serve
from microbatch.api.ports import ServingEngine


class Completions:
    """Answers prompts: one or many, texts or token ids."""

    def __init__(self, engine: ServingEngine, models: ServedModels, max_prompts: int) -> None:
        self._engine = engine
        self._models = models
        self._max_prompts = max_prompts

    def routes(self) -> list[Route]:
        """The one route."""
        return [Route("/v1/completions", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Check everything, then submit."""
        check_accepting(self._engine)
        body = parse_body(await request.body(), CompletionRequest, UNSUPPORTED_COMPLETION)
        model = self._models.resolve(body.model)
        params = completion_params(body)
        request.app.state.limits.check(params, body.best_of)
        await check_form(self._engine, params, body)
        tokenizer = self._engine.tokenizer
        prompts = read_prompts(
            body.prompt, PromptRules(self._max_prompts, tokenizer.vocab_size, self._engine.max_model_len)
        )
        encoded = await encode_prompts(self._engine, prompts)
        echoes = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts] if body.echo else None
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        envelope = Envelope("cmpl", "text_completion", model, include_usage, self._engine.fingerprint)
        renderer = CompletionRenderer(envelope, tokenizer, params, echoes, body.prompt_logprobs)
        return await serve(request, self._engine, body, encoded, widen(params, body.best_of), renderer)
