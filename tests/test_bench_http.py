"""The bench of the HTTP layer: its count of tokens and events, and one small load against both of our stand-ins."""

from __future__ import annotations

import argparse
import socket

import pytest

from bench.http_clients import Reader, figures
from bench.http_load import load, servers


@pytest.mark.parametrize("cut", range(1, 40))
def test_tokens_and_events_are_counted_wherever_the_bytes_are_cut(cut: int) -> None:
    data = b'HTTP/1.1 200 OK\r\n\r\n5\r\ndata: {"~"}\n\ndata: {"~~"}\n\n\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'
    with socket.socket() as sock:
        reader = Reader(sock)
        pieces = [data[i : i + cut] for i in range(0, len(data), cut)]
        ends = [reader.take(piece, 1.0 + i) for i, piece in enumerate(pieces)]
    assert (reader.tokens, reader.events, reader.num_bytes) == (3, 3, len(data))
    assert ends == [False] * (len(ends) - 1) + [True] and reader.first_at == 1.0


def test_a_stream_that_was_cut_off_is_not_whole() -> None:
    with socket.socket() as sock:
        readers = [Reader(sock) for _ in range(2)]
        for reader, data in zip(readers, (b"~~\n\n0\r\n\r\n", b"~\n\n"), strict=True):
            reader.take(data, 1.0)
        readers[1].take(b"", 3.0)
    found = figures(readers, 0.5, 2)
    assert (found["whole_streams"], found["tokens_per_s"], found["seconds"]) == (1, 2, 2.0)


@pytest.mark.slow
def test_every_stream_of_a_small_load_is_whole() -> None:
    chosen = argparse.Namespace(clients=4, litserve=None, transformers=None)
    for peer in servers(chosen, 20_000.0):
        found = load(peer, 100, 4)
        assert found.get("whole_streams") == 4, found
        assert found["lag"]["p99_ms"] >= 0 and found["health_p99_ms"] > 0 and found["tokens_per_s"] > 0


def test_a_server_that_does_not_start_has_an_error_for_figures() -> None:
    chosen = argparse.Namespace(clients=4, litserve="/bin/false", transformers=None)
    assert "PeerFailed" in load(servers(chosen, 1.0)[-1], 10, 4)["error"]
