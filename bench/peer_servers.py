"""The servers of ``bench.peers``: how each is started, and one that runs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

#: Servers that are written for the benches, run as files by the Python that has what they import.
PROGRAMS = Path(__file__).parent / "programs"
START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.3


class PeerFailed(Exception):
    """A server does not start, or does not answer as asked."""


@dataclass(frozen=True)
class Peer:
    """A server: its command with ``{port}`` to be filled in, the name of its model, fields that it does not take
    and others that it needs, and what its figures mean where that is not as for the others."""

    name: str
    command: list[str]
    model: str
    version: str
    leave_out: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass
class Running:
    """A started server."""

    process: subprocess.Popen[bytes]
    port: int

    def peak_mib(self) -> int:
        """Sum of the peaks of the process and its descendants."""
        return sum(_peak_kib(pid) for pid in family(self.process.pid)) // 1024


def known_peers(chosen: Mapping[str, Any]) -> list[Peer]:
    """Ours under both policies, and those whose place was given."""
    model = chosen["model"] or embedded_folder()
    ours = [sys.executable, "-m", "microbatch", "serve", model, "--dtype", "float32", "--port", "{port}"]
    ours += ["--served-model-name", "m", "--log-level", "warning", "--max-model-len", "2048"]
    peers = [
        Peer("microbatch", [*ours, "--policy", "continuous"], "m", "this one"),
        Peer("window", [*ours, "--max-batch-size", "32"], "m", "this one"),
    ]
    if chosen["llama"]:
        command = [chosen["llama"], "-m", chosen["gguf"], "--port", "{port}", "-t", "2", "--parallel", "32"]
        command += ["-c", str(32 * 512), "--no-webui"]
        peers.append(Peer("llama-server", command, "m", _version([chosen["llama"], "--version"]), ("cache_salt",)))
    if chosen["vllm"]:
        command = [chosen["vllm"], "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", "{port}"]
        command += ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "2048"]
        settings = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "OMP_NUM_THREADS": "2"}
        version = _version([chosen["vllm"], "-c", "import vllm; print(vllm.__version__)"])
        peers.append(Peer("vllm", command, "m", version, environment=settings))
    if chosen["transformers"]:
        command = [chosen["transformers"], "serve", "--continuous-batching", "--port", "{port}", "--dtype", "float32"]
        version = _version([chosen["transformers"], "version"])
        endless = {"generation_config": '{"do_sample": false, "eos_token_id": -1, "max_new_tokens": 2048}'}
        peers.append(Peer("transformers", command, model, version, ("ignore_eos", "cache_salt"), endless))
    if chosen.get("litserve"):
        command = [chosen["litserve"], str(PROGRAMS / "litserve_generate.py"), "{port}", model]
        version = _version([chosen["litserve"], "-c", "import litserve; print(litserve.__version__)"])
        peers.append(
            Peer(
                "litserve",
                command,
                "m",
                version,
                environment={"OMP_NUM_THREADS": "2"},
                note="whole answers as one piece",
            )
        )
    return peers


@contextlib.contextmanager
def running(peer: Peer) -> Iterator[Running]:
    """The server, ready; it is ended by its pid, with its children. ``PeerFailed`` with the end of its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", **peer.environment}
    if peer.name in ("microbatch", "window"):
        del environment["OMP_WAIT_POLICY"]  # it chooses by itself
    with tempfile.TemporaryFile() as log:
        command = [part.replace("{port}", str(port)) for part in peer.command]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_ready(process, port, log)
            yield Running(process, port)
        finally:
            _end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Any) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            raise PeerFailed(f"ended with {process.returncode}: {log.read()[-250:].decode(errors='replace')}")
        with contextlib.suppress(httpx.HTTPError):
            ready = "/ready" if "microbatch" in process.args else "/health"  # type: ignore[operator]
            if httpx.get(f"http://127.0.0.1:{port}{ready}", timeout=2).status_code == 200:
                return
        time.sleep(_POLL_S)
    raise PeerFailed(f"not ready within {START_TIMEOUT_S:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The session that was started for it, and nothing else."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def embedded_folder() -> str:
    """The model that is used unless another is named."""
    from microbatch.executor.embedded import default_home, ensure_embedded

    return str(ensure_embedded(default_home()))


def _version(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return next((line for line in lines if any(c.isdigit() for c in line)), "unknown")[:80]


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = [pid]
    with contextlib.suppress(OSError):
        for child in children.read_text().split():
            found += family(int(child))
    return found


def _peak_kib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0
