"""The bench of servers against each other: its sums, its client against a small server, and peers that fail."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import Any

import pytest

from bench.peer_servers import Peer, PeerFailed, known_peers, running
from bench.peers import measure, one_round, ratios

#: A server of one file: ready at once, so many tokens a stream.
SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["ignore_eos"] and "cache_salt" not in body
        self.send_response(200); self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices":[{"text":" a"}]}\\n\\n')
        usage = {"usage": {"completion_tokens": body["max_tokens"] - LACKING, "total_tokens": 9}}
        self.wfile.write(b"data: " + json.dumps(usage).encode() + b"\\n\\ndata: [DONE]\\n\\n")
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def peer(program: str) -> Peer:
    return Peer("small", [sys.executable, "-c", program, "{port}"], "m", "1", ("cache_salt",))


def test_a_round_counts_the_tokens_of_all_streams() -> None:
    small = peer(SERVER.replace("LACKING", "0"))
    with running(small) as server:
        figures = asyncio.run(one_round(small, server.port, 3, (5, 4), 1))
        assert server.peak_mib() > 0
    assert figures.keys() == {"tokens_per_s", "decode_tokens_per_s", "ttft_s"} and all(v > 0 for v in figures.values())
    assert server.process.poll() is not None


def test_a_server_that_gives_fewer_tokens_is_no_measurement() -> None:
    results = measure(peer(SERVER.replace("LACKING", "1")), [2], [(5, 4)], 1)
    assert results == {"version": "1", "error": "PeerFailed: 3 tokens instead of 4"}


def test_a_server_that_dies_at_its_start_says_why() -> None:
    with pytest.raises(PeerFailed, match="ended with 3: no such model"):
        with running(peer("import sys; print('no such model', file=sys.stderr); sys.exit(3)")):
            raise AssertionError("it did not start")


def test_ratios_are_ours_over_theirs_where_both_have_figures() -> None:
    def rate(value: float) -> dict[str, float]:
        return {"decode_tokens_per_s": value}

    results: dict[str, dict[str, Any]] = {
        "microbatch": {"version": "1", "a": rate(30.0), "b": rate(10.0)},
        "other": {"version": "2", "a": rate(20.0), "peak_mib": 7},
        "broken": {"version": "3", "error": "no"},
    }
    assert ratios(results, "microbatch") == {"other": {"a": 1.5}}


def test_a_server_that_answers_in_one_piece_is_compared_by_the_whole() -> None:
    figures = {"tokens_per_s": 30.0, "decode_tokens_per_s": 99.0}
    theirs = {"tokens_per_s": 20.0, "decode_tokens_per_s": 0.0}
    results: dict[str, dict[str, Any]] = {"microbatch": {"a": figures}, "litserve": {"note": "whole", "a": theirs}}
    assert ratios(results, "microbatch") == {"litserve": {"a": 1.5}}


def test_it_has_no_decode_rate() -> None:
    small = replace(peer(SERVER.replace("LACKING", "0")), note="one piece")
    with running(small) as server:
        assert asyncio.run(one_round(small, server.port, 1, (5, 4), 1))["decode_tokens_per_s"] == 0


def test_only_servers_whose_place_is_given_are_known() -> None:
    chosen = {"model": "folder", "llama": None, "gguf": None, "vllm": None, "transformers": None}
    assert [p.name for p in known_peers(chosen)] == ["microbatch", "window"]
    chosen["litserve"] = sys.executable
    assert [p.name for p in known_peers(chosen)][-1] == "litserve"
    del chosen["litserve"]
    chosen["vllm"] = sys.executable
    assert [p.name for p in known_peers(chosen)][-1] == "vllm"
