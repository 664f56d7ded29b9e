"""Health, readiness and what happens to requests in each state of the engine."""

from __future__ import annotations

import pytest

from microbatch.api.app import create_app
from microbatch.engine.stats import EngineStatus
from tests.api.fake_engine import FakeEngine
from tests.api.support import COMPLETIONS, body, client_of, error_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("state", "health", "ready", "code"),
    [
        ("ready", 200, 200, None),
        ("draining", 200, 503, "draining"),
        ("starting", 503, 503, "starting"),
        ("dead", 503, 503, "engine_dead"),
        ("closed", 503, 503, "engine_dead"),
    ],
)
async def test_states(state: str, health: int, ready: int, code: str | None) -> None:
    engine = FakeEngine(status=EngineStatus(state, "for a reason" if code else ""))
    async with client_of(create_app(engine)) as client:
        for path, status in (("/health", health), ("/ready", ready)):
            response = await client.get(path)
            assert response.status_code == status
            assert response.json() == {"status": state, "reason": "for a reason" if code else None}
        response = await client.post(COMPLETIONS, json=body(COMPLETIONS))
        if code is None:
            assert response.status_code == 200
        else:
            error = error_of(response, 503)
            assert (error["code"], error["message"]) == (code, "for a reason")


async def test_models_before_the_start_are_503() -> None:
    from microbatch.errors import UnavailableError

    class Starting(FakeEngine):
        @property
        def max_model_len(self) -> int:
            raise UnavailableError("the model is being loaded")

        @max_model_len.setter
        def max_model_len(self, value: int) -> None:
            pass

    async with client_of(create_app(Starting(status=EngineStatus("starting")))) as client:
        for path in ("/v1/models", "/v1/models/other"):
            error_of(await client.get(path), 503)
