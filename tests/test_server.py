"""The whole server in a process of its own: start, answers, signals, exit status. The real model over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
KEY = "a-key-of-the-test"


class Running:
    """A server process and requests to it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and parsed body."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode()
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.status, json.loads(text) if is_json else text

    def health(self) -> int:
        """Status of ``/health``; 0 while nothing listens."""
        try:
            return self.call("GET", "/health")[0]
        except OSError:
            return 0


@contextmanager
def running(*flags: str) -> Iterator[Running]:
    """``microbatch serve`` on a free port, ready; ended by force if the test does not end it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "microbatch", "serve", "--port", str(port), "--api-key", KEY, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    server = Running(process, port)
    seen = set()
    try:
        deadline = time.monotonic() + 90
        while (status := server.health()) != 200:
            seen.add(status)
            assert process.poll() is None and time.monotonic() < deadline, process.stderr and process.stderr.read()
            time.sleep(0.05)
        assert seen <= {0, 503}
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def stream(server: Running, results: list[str], started: threading.Semaphore, max_tokens: int) -> None:
    """One streamed request, whole; says when its first event is there."""
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        first = response.readline().decode()
        started.release()
        results.append(first + response.read().decode())


def test_it_answers_drains_and_exits_with_0(embedded_model: Path) -> None:
    with running("--max-model-len", "512", "--system-prompt", "Answer in one short sentence.") as server:
        chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        status, answer = server.call("POST", "/v1/chat/completions", chat)
        assert status == 200 and "Paris" in answer["choices"][0]["message"]["content"]
        status, page = server.call("GET", "/metrics")
        assert status == 200 and 'microbatch:batch_closed_total{reason="window"}' in page
        results: list[str] = []
        started = threading.Semaphore(0)
        threads = [threading.Thread(target=stream, args=(server, results, started, 40)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert started.acquire(timeout=30)
        server.process.send_signal(signal.SIGTERM)
        while (refused := server.call("POST", "/v1/completions", {"prompt": "Hi"}))[0] == 200:
            pass
        assert refused[0] == 503 and refused[1]["error"]["code"] == "draining"
        for thread in threads:
            thread.join(30)
        assert all('"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n") for text in results)
        assert server.process.wait(10) == 0


def test_an_impatient_second_signal_ends_streams_with_an_error_event(embedded_model: Path) -> None:
    with running("--max-model-len", "2048") as server:
        results: list[str] = []
        started = threading.Semaphore(0)
        thread = threading.Thread(target=stream, args=(server, results, started, 2000))
        thread.start()
        assert started.acquire(timeout=30)
        server.process.send_signal(signal.SIGTERM)
        while server.call("GET", "/ready")[0] == 200:
            pass
        server.process.send_signal(signal.SIGTERM)
        thread.join(20)
        assert '"code":"draining"' in results[0] and results[0].endswith("data: [DONE]\n\n")
        assert server.process.wait(10) == 0


def test_a_model_that_cannot_be_loaded_is_one_line_and_status_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    command = [sys.executable, "-m", "microbatch", "serve", str(tmp_path), "--port", "0", "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("microbatch: error: ") and done.stderr.count("\n") == 1, done.stderr
