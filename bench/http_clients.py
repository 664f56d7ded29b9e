"""Streaming clients that cost almost nothing, in a process of their own: sockets, one poll, bytes counted.

Each of N clients asks for one long streamed chat answer; every token of the servers under test is the letter ``~``, so
tokens are counted by that letter, whatever the form and size of the events. Prints one JSON object.

    python -m bench.http_clients PORT --clients 64 --tokens 5000 [--model m] [--timeout-s 60]
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import time
from dataclasses import dataclass
from typing import Any

TOKEN = b"~"
#: Between two looks at the sockets. Reading more at once is what keeps the clients cheap.
_REST_S = 0.005


@dataclass(slots=True)
class Reader:
    """One stream and what has come of it."""

    sock: socket.socket
    tokens: int = 0
    events: int = 0
    num_bytes: int = 0
    last: bytes = b""
    first_at: float = 0.0
    ended_at: float = 0.0

    def take(self, data: bytes, now: float) -> bool:
        """Count; True when the stream is at its end."""
        self.first_at = self.first_at or now
        self.num_bytes += len(data)
        self.tokens += data.count(TOKEN)
        self.events += data.count(b"\n\n") + (self.last[-1:] == b"\n" == data[:1])
        self.last = (self.last + data)[-64:]
        if not data or self.last.endswith(b"0\r\n\r\n"):
            self.ended_at = now
        return bool(self.ended_at)


def ask(port: int, model: str, tokens: int) -> Reader:
    """A connected client that has sent its request."""
    content = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "stream": True}
    body = json.dumps(content).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nConnection: keep-alive\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    sock.sendall(head.encode() + body)
    sock.setblocking(False)
    return Reader(sock)


def read_all(readers: list[Reader], timeout_s: float) -> None:
    """Until every stream has ended, or the time is over."""
    poll = select.epoll()
    by_number = {reader.sock.fileno(): reader for reader in readers}
    for number in by_number:
        poll.register(number, select.EPOLLIN)
    deadline = time.perf_counter() + timeout_s
    while by_number and (now := time.perf_counter()) < deadline:
        for number, _ in poll.poll(0.1):
            if by_number[number].take(by_number[number].sock.recv(1 << 18), now):
                poll.unregister(number)
                del by_number[number]
        time.sleep(_REST_S)
    poll.close()


def figures(readers: list[Reader], sent: float, wanted: int) -> dict[str, Any]:
    """What all of them have seen. Rates count from the first byte of the first stream to the last of the last one."""
    ends = [reader.ended_at or time.perf_counter() for reader in readers]
    first = min((r.first_at for r in readers if r.first_at), default=sent)
    seconds = max(ends) - first
    tokens = sum(reader.tokens for reader in readers)
    return {
        "tokens_per_s": round(tokens / seconds),
        "events_per_s": round(sum(reader.events for reader in readers) / seconds),
        "bytes_per_token": round(sum(reader.num_bytes for reader in readers) / max(1, tokens)),
        "seconds": round(seconds, 2),
        "whole_streams": sum(reader.ended_at > 0 and reader.tokens == wanted for reader in readers),
        "client_cpu_s": round(time.process_time(), 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--model", default="m")
    parser.add_argument("--timeout-s", type=float, default=60.0)
    chosen = parser.parse_args()
    began = time.perf_counter()
    all_readers = [ask(chosen.port, chosen.model, chosen.tokens) for _ in range(chosen.clients)]
    read_all(all_readers, chosen.timeout_s)
    print(json.dumps(figures(all_readers, began, chosen.tokens)))
