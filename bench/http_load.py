"""What does the HTTP layer carry, and does the event loop stay free under it? 64 streaming clients, no model.

Every server streams the same tokens from a stand-in for its model, in turn, to the same clients
(``bench.http_clients``, a process of their own that counts bytes). First at a rate that the stand-in keeps (50,000
tokens/s in all), then as fast as it goes. Ours twice: ``microbatch`` is the whole engine over a ``FakeExecutor``,
``microbatch http`` only the streams and what is behind them, without scheduler and executor.

- ``tokens_per_s``, ``events_per_s``: what has come to the clients; tokens that wait for a client may share an event
- ``lag``: how late the event loop of the process that talks to clients runs what is due, in milliseconds
- ``health_p99_ms``: of ``GET /health`` on a connection of its own, asked again and again meanwhile
- ``cpu_us_per_token``: processor time of the server and its children

    python -m bench.http_load [--litserve PYTHON] [--transformers PYTHON] [--rate 50000] [--seconds 6] [--clients 64]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.peer_servers import PROGRAMS, Peer, PeerFailed, embedded_folder, family, running
from bench.report import write

#: A stand-in that goes as fast as it can is given so many tokens.
_FREE_RATE = 20_000
_HEALTH_EVERY_S = 0.02
_TIMEOUT_S = 60.0


def servers(chosen: argparse.Namespace, rate: float) -> list[Peer]:
    """Ours, and those whose Python was given."""
    more = [str(rate), str(chosen.clients)]
    ours = [sys.executable, str(PROGRAMS / "microbatch_stub.py"), "{port}", *more]
    peers = [Peer("microbatch", [*ours, "whole"], "m", "this one"), Peer("microbatch http", [*ours, "http"], "m", "")]
    if chosen.litserve:
        command = [chosen.litserve, str(PROGRAMS / "litserve_stub.py"), "{port}", *more]
        peers.append(Peer("litserve", command, "m", ""))
    if chosen.transformers:
        model = embedded_folder()
        command = [chosen.transformers, str(PROGRAMS / "transformers_stub.py"), "{port}", *more, model]
        peers.append(Peer("transformers serve", command, model, ""))
    return peers


class Health(threading.Thread):
    """Asks ``/health`` again and again and notes how long each answer takes, in milliseconds."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.over = threading.Event()
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)

    def run(self) -> None:
        """Until ``over``."""
        while not self.over.is_set():
            began = time.perf_counter()
            self._connection.request("GET", "/health")
            response = self._connection.getresponse()
            response.read()
            self.times.append((time.perf_counter() - began) * 1e3 if response.status == 200 else _TIMEOUT_S * 1e3)
            self.over.wait(_HEALTH_EVERY_S)
        self._connection.close()

    def p99(self) -> float:
        """The 99th percentile; of few answers the worst."""
        return round(sorted(self.times)[len(self.times) * 99 // 100], 1)


def lag(port: int) -> dict[str, float]:
    """What the server measured since the last call."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/lag")
        figures: dict[str, float] = json.loads(connection.getresponse().read())
    return figures


def cpu_s(pid: int) -> float:
    """Processor time of a process and its descendants so far."""
    ticks = 0
    for number in family(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def load(peer: Peer, tokens: int, clients: int) -> dict[str, Any]:
    """Figures of one server; an error in their place where it fails."""
    try:
        with running(peer) as server:
            command = [sys.executable, "-m", "bench.http_clients", str(server.port), "--model", peer.model]
            command += ["--clients", str(clients), "--timeout-s", str(_TIMEOUT_S), "--tokens"]
            subprocess.run([*command, "20"], check=True, capture_output=True)  # what happens once, happens here
            lag(server.port)
            before, health = cpu_s(server.process.pid), Health(server.port)
            health.start()
            done = subprocess.run([*command, str(tokens)], check=True, capture_output=True, text=True)
            health.over.set()
            health.join()
            used = cpu_s(server.process.pid) - before
            figures = json.loads(done.stdout)
            figures["lag"], figures["health_p99_ms"] = lag(server.port), health.p99()
            figures["cpu_us_per_token"] = round(used / (figures["seconds"] * figures["tokens_per_s"]) * 1e6, 1)
            return {**figures}
    except (PeerFailed, OSError, ValueError, subprocess.SubprocessError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litserve", help="Python of an environment that has LitServe")
    parser.add_argument("--transformers", help="Python of an environment that has transformers[serving]")
    parser.add_argument("--rate", type=float, default=50_000, help="tokens/s of all streams together")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement, if the server keeps up")
    parser.add_argument("--clients", type=int, default=64)
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name, rate in (("paced", arguments.rate), ("free", 0.0)):
        wanted = int((rate or _FREE_RATE) * arguments.seconds / arguments.clients)
        results[name] = {}
        for one in servers(arguments, rate):
            results[name][one.name] = load(one, wanted, arguments.clients)
            print(name, one.name, results[name][one.name], flush=True)
    write("http_load", (__doc__ or "").splitlines()[0], results)
