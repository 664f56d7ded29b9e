"""What is settled before a load."""

from __future__ import annotations

import errno
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from microbatch.errors import SetupError
from microbatch.executor.embedded import EMBEDDED_NAME
from microbatch.executor.sources import ModelFiles
from microbatch.settings import Settings
from microbatch.startup import check_files, check_port, prefer_passive_waiting, preflight


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_refused(taken_port: int) -> None:
    with pytest.raises(SetupError, match=f"port {taken_port} on 127.0.0.1 is taken"):
        check_port("127.0.0.1", taken_port)
    with pytest.raises(SetupError, match="is taken"):
        check_port("0.0.0.0", taken_port)


def test_a_free_port_stays_free(taken_port: int) -> None:
    check_port("127.0.0.1", 0)
    check_port("localhost", 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "a" * 300, "not a host"])
def test_an_address_of_another_machine_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if host == "not a host":  # no question to a name server in a test

        def fail(*_: object, **__: object) -> None:
            raise socket.gaierror("unknown")

        monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(SetupError, match="cannot listen|is not an address"):
        check_port(host, 0)


def test_a_privileged_port_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microbatch.startup._try_to_bind", lambda *_: PermissionError(errno.EACCES, "no"))
    with pytest.raises(SetupError, match="--port above 1023"):
        check_port("127.0.0.1", 80)


def test_preflight_says_what_the_model_is() -> None:
    assert preflight(Settings(port=0)).name == EMBEDDED_NAME


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(port=0, policy="nope"), "unknown policy 'nope'"),
        (Settings(port=0, policy_arg=("colour=1",)), "policy 'window'"),
        (Settings(port=0, model="./nowhere"), "does not exist"),
        (Settings(port=0, api_key=("two words",)), "an API key must be"),
    ],
)
def test_preflight_refuses_in_one_line(settings: Settings, message: str) -> None:
    with pytest.raises(SetupError, match=message) as caught:
        preflight(settings)
    assert "\n" not in caught.value.message


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SetupError, match="device cuda was asked for, but"):
        preflight(Settings(port=0, device="cuda"))


def test_a_context_longer_than_the_config_names_is_refused(tmp_path: Path) -> None:
    files = ModelFiles("some", tmp_path)
    check_files(files, Settings(max_model_len=9))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8}')
    check_files(files, Settings())
    check_files(files, Settings(max_model_len=8))
    with pytest.raises(SetupError, match="max_model_len 9 is more than the model's context of 8 tokens"):
        check_files(files, Settings(max_model_len=9))
    check_files(ModelFiles("some", tmp_path, "some.gguf"), Settings(max_model_len=9))


def test_what_is_refused_before_the_load_needs_no_torch(tmp_path: Path) -> None:
    save = ("config.json", '{"max_position_embeddings": 8}'), ("tokenizer.json", "{}"), ("model.safetensors", "")
    for name, text in save:
        (tmp_path / name).write_text(text)
    program = f"""
import sys
from microbatch.cli import main
sys.modules["torch"] = None
sys.argv = ["microbatch", "serve", {str(tmp_path)!r}, "--port", "0", "--max-model-len", "9"]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr == "microbatch: error: max_model_len 9 is more than the model's context of 8 tokens\n"


def test_an_open_door_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="microbatch"):
        preflight(Settings(host="127.0.0.1", port=0))
        preflight(Settings(host="0.0.0.0", port=0, api_key=("k",)))
        assert not caplog.records
        preflight(Settings(host="0.0.0.0", port=0))
    assert "without an API key" in caplog.text


def test_openmp_waits_passively_unless_the_user_chose() -> None:
    environment: dict[str, str] = {}
    prefer_passive_waiting(environment)
    assert environment == {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "5000"}
    for chosen in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        environment = dict(chosen)
        prefer_passive_waiting(environment)
        assert environment == {"OMP_WAIT_POLICY": "passive", **chosen} if "GOMP_SPINCOUNT" in chosen else chosen


def test_openmp_reads_what_is_set_before_torch_is_imported() -> None:
    program = "from microbatch.startup import prefer_passive_waiting as prefer; prefer(); import torch"
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}:{root / 'kernels'}", "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr and "GOMP_SPINCOUNT = '5000'" in done.stderr
