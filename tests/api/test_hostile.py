"""10,000 malformed requests over raw sockets: no 500, no hang, no block lost, memory flat, and it still answers."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import re
import resource
import select
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import LiveServer, live_server

pytestmark = pytest.mark.slow
COUNT = 10_000
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/v1/models/x", "/none", "/")
#: A whole request is answered sooner than this.
_PATIENCE_S = 0.02
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

#: Values that fit nowhere, or only just.
STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324),
    *("", "x", "\x00", "\ud800", "x\udfff", "é" * 50, "9" * 300, "A" * 5000, "null", "💥", "../../etc/passwd"),
    *([], [[]], [None], [[1, [2]]], {}, {"a": 1}, {"type": "json_schema"}, [[1, 2], "x"], [-1], [10**30], {"": {}}),
]
GOOD: dict[str, Any] = {
    "model": "fake",
    "prompt": "Hi",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 1,
    "stop": ["x"],
    "stream": True,
    "logit_bias": {"5": 1.0},
    "logprobs": 1,
    "top_logprobs": 1,
    "seed": 3,
    "user": "u",
    "echo": True,
    "best_of": 1,
    "presence_penalty": 0.1,
    "stop_token_ids": [3],
    "min_tokens": 1,
    "top_k": 3,
    "cache_salt": "s",
    "priority": 1,
    "tools": [],
    "response_format": {"type": "text"},
}
_ONLY_IN_CHAT = {"messages", "tools", "response_format", "top_logprobs"}
_NOT_IN_CHAT = {"prompt", "echo", "best_of", "logprobs", "top_logprobs"}


def random_body(rnd: random.Random, chat: bool) -> bytes:
    """A request as JSON, spoiled in one of many ways; some come through whole."""
    known = sorted(GOOD.keys() - (_NOT_IN_CHAT if chat else _ONLY_IN_CHAT) if rnd.random() < 0.9 else GOOD)
    names = {*rnd.sample(known, rnd.randint(0, 6)), "max_tokens", "messages" if chat else "prompt"}
    spoiled = rnd.choice((0.0, 0.1, 0.3))
    content: Any = {name: rnd.choice(STRANGE) if rnd.random() < spoiled else GOOD[name] for name in sorted(names)}
    if rnd.random() < 0.1:
        content["messages"] = [{"role": rnd.choice(STRANGE), "content": rnd.choice(STRANGE)} for _ in range(2)]
    if rnd.random() < 0.05:
        content = rnd.choice(STRANGE)
    data = json.dumps(content).encode()
    kind = rnd.randrange(20)
    if kind == 0:
        data = data[: rnd.randrange(len(data) + 1)]
    elif kind == 1:
        place = rnd.randrange(len(data) + 1)
        data = data[:place] + rnd.randbytes(rnd.randint(1, 4)) + data[place:]
    elif kind == 2:
        depth = rnd.choice((10, 500, 5000, 50_000))
        data = b'{"prompt":' + rnd.choice((b"[", b'{"a":')) * depth
    elif kind == 3:
        data = rnd.randbytes(rnd.randint(0, 60))
    elif kind == 4:
        data = json.dumps(content, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
    return data


def random_request(rnd: random.Random) -> bytes:
    """A whole request as bytes: a spoiled body, and now and then a spoiled head or framing."""
    method = rnd.choice(("POST",) * 20 + ("GET", "DELETE", "BREW"))
    path = rnd.choice(_PATHS[:2] * 10 + _PATHS)
    body = random_body(rnd, "chat" in path)
    length = str(len(body))
    headers = [f"Host: x{rnd.choice(('', ':99999', chr(7)))}", "Content-Type: application/json", "Connection: close"]
    kind = rnd.randrange(20)
    if kind == 0:
        length = rnd.choice(("-1", "abc", "99999999999999999999", str(len(body) + 5), "0x10", "1, 2", ""))
    elif kind == 1:
        headers += ["Transfer-Encoding: chunked"]
        size = rnd.choice((f"{len(body):x}", "-5", "zz", "fffffffffffffffff", f"{len(body) + 3:x}"))
        body, length = f"{size}\r\n".encode() + body + b"\r\n" + rnd.choice((b"0\r\n\r\n", b"", b"\xff\r\n")), ""
    elif kind == 2:
        headers += [
            rnd.choice(("Expect: 100-continue", "X-Request-Id: a b\tc", "A" * 3000 + ": b", "Upgrade: websocket"))
        ]
    elif kind == 3:
        path = rnd.choice(
            ("/v1/%00", "/%ff%fe", "/v1/models/" + "a" * 2000, "//", "/v1/completions?" + "a=b&" * 300, "*")
        )
    head = f"{method} {path} HTTP/{rnd.choice(('1.1',) * 20 + ('1.0', '9.9', '2.0'))}\r\n"
    if length:
        headers.append(f"Content-Length: {length}")
    if kind == 4:
        head = rnd.choice(("", "\r\n\r\n", "GET\r\n", "\x16\x03\x01\x02\x00", "POST / HTTP/1.1 x\r\n"))
    return (head + "\r\n".join(headers) + "\r\n\r\n").encode("latin-1") + body


def exchange(server: LiveServer, data: bytes) -> bytes:
    """Send everything and read what comes back until the server closes. When it waits for more, it is told that no more
    follows."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        received = b""
        with contextlib.suppress(ConnectionError):  # it may have closed before it has read everything
            sock.sendall(data)
            if not select.select([sock], [], [], _PATIENCE_S)[0]:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(1 << 16):
                received += piece
    return received.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")


def check(server: LiveServer, data: bytes) -> int:
    """Status of one exchange, 0 if it was closed without an answer."""
    answer = exchange(server, data)
    found = _STATUS.match(answer)
    status = int(found[1]) if found else 0
    assert status < 500, (data[:300], answer[:600])
    assert b"Traceback" not in answer
    head, _, content = answer.partition(b"\r\n\r\n")
    if status >= 400 and content and b"chunked" not in head:
        assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}, (data[:300], answer[:600])
    return status


def rss_mib() -> float:
    """Memory of this process, which is the server's as well. What the requests of one after the other leave behind."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


@pytest.mark.timeout(110)
def test_malformed_requests_harm_nothing() -> None:
    rnd = random.Random(4)
    seen: dict[int, int] = {}
    with live_server(max_body_bytes=2**20) as server:
        for _ in range(COUNT // 10):
            check(server, random_request(rnd))
        server.until_idle()
        before = rss_mib()
        for _ in range(COUNT - COUNT // 10):
            status = check(server, random_request(rnd))
            seen[status] = seen.get(status, 0) + 1
        server.until_idle()
        assert rss_mib() - before < 16, "memory grows"
        status, content = server.call("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 2})
        assert status == 200 and json.loads(content)["usage"]["completion_tokens"] == 2
        server.until_idle()
    assert seen.get(200, 0) > COUNT // 10 and seen.get(400, 0) > COUNT // 3, seen
