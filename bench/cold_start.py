"""How long from the command to the first token? A fresh process of ``microbatch serve``, the embedded model cached.

python -m bench.cold_start [--rounds 3]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.report import median, write


def one_start() -> dict[str, float]:
    """Seconds until ``/health`` is 200 and until the first event of a stream, and the process's peak memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.perf_counter()
    command = [sys.executable, "-m", "microbatch", "serve", "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(command, env=os.environ)
    try:
        while not healthy(port):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}")
            time.sleep(0.02)
        ready = time.perf_counter() - started
        first_event(port)
        first = time.perf_counter() - started
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        return {"ready_s": ready, "first_token_s": first, "peak_rss_mib": peak}
    finally:
        process.terminate()
        process.wait(30)


def healthy(port: int) -> bool:
    with contextlib.suppress(OSError):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def first_event(port: int) -> None:
    body: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: {")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="cold start")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = [one_start() for _ in range(parser.parse_args().rounds)]
    kept = {name: median((r[name] for r in rounds), 2) for name in rounds[0]}
    print(kept)
    write("cold_start", (__doc__ or "").partition("\n")[0], kept)
