"""What the HTTP layer needs of an engine; ``microbatch.engine.client.AsyncEngine`` has it, a fake in a test may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from microbatch.core.chat import ChatOptions
from microbatch.core.ports import Tokenizer
from microbatch.core.request import SamplingParams
from microbatch.core.structured import StructuredOutput
from microbatch.engine.stats import EngineStatistics, EngineStatus, Observer
from microbatch.engine.stream import RequestStream


class ServingEngine(Protocol):
    """An engine that accepts requests. Before it has started, what it cannot tell raises ``UnavailableError``."""

    @property
    def status(self) -> EngineStatus:
        """starting, ready, draining, dead or closed, and why."""
        ...

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the answers of the model may change."""
        ...

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, without blocking the event loop."""
        ...

    async def encode_chat(
        self, messages: Sequence[dict[str, object]], options: ChatOptions = ChatOptions()
    ) -> list[int]:
        """Token ids of a conversation, without blocking the event loop."""
        ...

    async def check_form(self, form: StructuredOutput) -> None:
        """Get the form of an answer ready, without blocking the event loop. Raises ``InvalidRequestError``."""
        ...

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        client: str = "",
        cache_salt: str = "",
    ) -> RequestStream:
        """Accept a request or raise why not, at once."""
        ...

    def statistics(self) -> EngineStatistics:
        """Numbers of this moment."""
        ...

    def note_rejection(self, reason: str) -> None:
        """Tell the observers of a request that was refused before ``submit``."""
        ...

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` of everything that happens from now on."""
        ...
