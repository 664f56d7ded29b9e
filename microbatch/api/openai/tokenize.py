"""``POST /tokenize`` and ``POST /detokenize``: what the model is fed for a text, and back."""

from __future__ import annotations

from functools import partial

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from microbatch.api.errors import json_response
from microbatch.api.health import check_accepting
from microbatch.api.openai.body import parse_body
from microbatch.api.openai.messages import read_messages
from microbatch.api.openai.models import ServedModels
from microbatch.api.openai.schema import UNSUPPORTED_TOKENIZE, DetokenizeRequest, TokenizeRequest
from microbatch.api.ports import ServingEngine
from microbatch.core.ports import Tokenizer
from microbatch.errors import InvalidRequestError, UnsupportedError


class Tokenize:
    """The tokenizer of the served model. What takes long for a long text runs in threads."""

    def __init__(self, engine: ServingEngine, models: ServedModels) -> None:
        self._engine = engine
        self._models = models

    def routes(self) -> list[Route]:
        """Both routes."""
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Token ids of ``prompt`` or of ``messages``, exactly as a completion or a chat would feed them; with
        ``return_token_strs`` also the text of each token alone."""
        check_accepting(self._engine)
        body = parse_body(await request.body(), TokenizeRequest, UNSUPPORTED_TOKENIZE)
        self._models.resolve(body.model)
        ids = await self._encode(body)
        tokenizer, most = self._engine.tokenizer, self._engine.max_model_len
        return await to_thread.run_sync(_tokens_response, tokenizer, ids, most, bool(body.return_token_strs))

    async def detokenize(self, request: Request) -> Response:
        """The text of ``tokens``, special tokens by their names."""
        check_accepting(self._engine)
        body = parse_body(await request.body(), DetokenizeRequest, {})
        self._models.resolve(body.model)
        tokenizer = self._engine.tokenizer
        _check_ids(body.tokens, tokenizer.vocab_size)
        decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": await to_thread.run_sync(decode)})

    async def _encode(self, body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            if body.add_special_tokens:
                raise UnsupportedError(
                    "add_special_tokens: the template writes them itself", param="add_special_tokens"
                )
            return await self._engine.encode_chat(read_messages(body.messages))
        assert body.prompt is not None
        return await self._engine.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)


def _tokens_response(tokenizer: Tokenizer, ids: list[int], max_model_len: int, with_texts: bool) -> Response:
    texts = [tokenizer.token_text(token_id)[0] for token_id in ids] if with_texts else None
    return json_response({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": texts})


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"tokens[{index}] is {ids[index]}: token ids are from 0 to {vocab_size - 1}", param="tokens"
        )
