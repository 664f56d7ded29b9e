"""Signals while the model loads: a process with a load that never ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import logging, sys, threading
from microbatch import server, wiring
from microbatch.settings import Settings

def load(*_):
    print("loading", flush=True)
    threading.Event().wait()

logging.basicConfig(level="INFO")
wiring.build_engine = load
sys.exit(server.run_server(Settings(port=0)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_at_once(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-c", PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "loading\n"
            process.send_signal(number)
            _, told = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0, told
    assert "ending before the model is ready" in told and "Traceback" not in told
