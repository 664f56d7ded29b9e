"""The engine behind real sockets: clients that leave or do not read, health while it works, health when it is dead."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from microbatch.core.plan import StepPlan
from microbatch.executor.fake import FakeExecutor, constant
from tests.api.live_server import LiveServer, live_server
from tests.engine.factory import Gate, make_engine

LONG = {"model": "fake", "prompt": "Hi", "max_tokens": 4000, "ignore_eos": True}
PATIENCE_S = 20.0


def slow(plan: StepPlan) -> float:
    """A step of a model that takes a little while."""
    return 0.001


@contextlib.contextmanager
def asked(server: LiveServer, **fields: Any) -> Iterator[http.client.HTTPConnection]:
    """A connection over which a long completion was asked for."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps({**LONG, **fields}))
        yield connection


def metric(server: LiveServer, name: str) -> float:
    """A number of ``/metrics``."""
    page = server.call("GET", "/metrics")[1].decode()
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"microbatch:{name} "))


def long_engine(**options: Any) -> Any:
    return make_engine(policy="continuous", num_blocks=600, max_model_len=8192, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_socket_frees_everything(stream: bool) -> None:
    gate = threading.Event()

    def latency(plan: StepPlan) -> float:
        gate.set()
        return slow(plan)

    with live_server(long_engine(executor=FakeExecutor(constant(65), latency=latency))) as server:
        with asked(server, stream=stream) as connection:
            if stream:
                response = connection.getresponse()
                assert [response.readline()[:6] for _ in range(3)] == [b"data: ", b"\n", b"data: "]
            assert gate.wait(PATIENCE_S)
        server.until_idle()
        assert metric(server, 'request_success_total{finished_reason="abort"}') == 1
        assert metric(server, "generation_tokens_total") < 4000


def test_a_reader_that_stops_is_dropped_and_its_neighbours_go_on() -> None:
    """It reads nothing at all: buffers fill, then 64 tokens may wait. Its connection is cut off."""
    engine = long_engine(executor=FakeExecutor(constant(65), remember=False))
    body = json.dumps({**LONG, "max_tokens": 8000, "stream": True, "logprobs": 5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with live_server(engine, send_buffer=4096, max_unread_tokens=64) as server, socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", server.port))
        lazy.sendall(head + body)
        deadline = time.monotonic() + PATIENCE_S
        while not (dropped := metric(server, 'slow_readers_dropped_total{reason="unread"}')):
            assert time.monotonic() < deadline
            with asked(server, max_tokens=20) as connection:
                assert connection.getresponse().status == 200
        assert dropped == 1
        server.until_idle()
        lazy.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError):
            while lazy.recv(1 << 20):
                pass


def test_health_answers_while_the_device_is_busy_and_a_long_prompt_is_encoded() -> None:
    gate = Gate()
    with live_server(make_engine(FakeExecutor(latency=gate.latency), policy="continuous", max_model_len=900)) as server:
        with asked(server, max_tokens=5), asked(server, prompt="x" * 800, max_tokens=5):
            assert gate.entered.acquire(timeout=PATIENCE_S)
            times = []
            for path in ("/health", "/metrics", "/v1/models") * 20:
                began = time.perf_counter()
                assert server.call("GET", path)[0] == 200
                times.append(time.perf_counter() - began)
            gate.open()
        server.until_idle()
    assert sorted(times)[-2] < 0.3


def test_a_dead_engine_is_told_by_health(monkeypatch: pytest.MonkeyPatch) -> None:
    with live_server() as server:
        assert server.call("GET", "/health")[0] == 200

        def broken(now: float) -> None:
            raise RuntimeError("the scheduler fell over")

        monkeypatch.setattr(server.engine.parts.loop.core, "begin_step", broken)
        status, content = server.call("POST", "/v1/completions", {"prompt": "Hi"})
        assert status == 503 and json.loads(content)["error"]["code"] == "engine_dead"
        status, content = server.call("GET", "/health")
        assert status == 503 and b"the scheduler fell over" in content


def test_a_failure_in_mid_stream_is_one_event_and_the_end() -> None:
    faults = iter([None, None, None, RuntimeError("boom")])
    with live_server(make_engine(FakeExecutor(fault=lambda plan: next(faults, None)), policy="continuous")) as server:
        with asked(server, stream=True) as connection:
            content = connection.getresponse().read()
        server.until_idle()
        assert server.call("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 2})[0] == 200
    assert content.count(b'data: {"error":') == 1 and b"boom" in content and content.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"' not in content


def test_what_is_no_http_gets_an_error_of_the_api() -> None:
    with live_server() as server, socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}
