"""The command: what it prints, how it refuses, and that it is quick about both."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import microbatch
from microbatch import cli
from microbatch.errors import SetupError
from microbatch.executor import embedded, hub, sources
from microbatch.settings import SETTINGS, Settings

ROOT = Path(__file__).parents[2]

#: Runs the command and tells whether torch was loaded for it.
PROGRAM = """\
import sys
from microbatch.cli import main

code = main(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(code)
"""


def run(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, offline and with an empty environment."""
    variables = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "error",
        **environment,
    }
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, env=variables, cwd=home, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["srve"], 2, "No such command 'srve'. Did you mean 'serve'?"),
        (["serve", "--prt", "1"], 2, "No such option: --prt (Possible options: --port)"),
        (["serve", "--port"], 2, "Option '--port' requires an argument."),
        (["serve", "a", "b"], 2, "Got unexpected extra argument(s) (b)"),
        (["serve", "--port", "x"], 1, "--port must be a whole number, got 'x'"),
        (["serve", "--policy", "nope"], 1, "unknown policy 'nope'; known:"),
        (["serve", "./nowhere"], 1, "model './nowhere' does not exist"),
        (["serve", "bad name\nx"], 1, "does not exist"),
        (["serve", "no/such-model"], 1, "model 'no/such-model' is not in the local cache and HF_HUB_OFFLINE is set"),
        (["serve", "--config", "no.ini"], 1, "--config: cannot read file no.ini"),
        (["serve", "--host", "192.0.2.1"], 1, "cannot listen on 192.0.2.1"),
        (["pull", "no/such-model"], 1, "HF_HUB_OFFLINE is set"),
        (["pull", "--verify"], 1, "run `microbatch pull`"),
        (["pull", "no/such-model", "--force"], 1, "--verify and --force are for the embedded model only"),
    ],
)
def test_a_refusal_is_one_line_without_torch(tmp_path: Path, arguments: Sequence[str], code: int, message: str) -> None:
    done = run(*arguments, home=tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith("microbatch: error: ") and message in line
    assert (done.returncode, done.stdout) == (code, "False\n")


def test_a_taken_port_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run("serve", home=tmp_path, MICROBATCH_PORT=str(port))
    assert done.stderr == (
        f"microbatch: error: port {port} on 127.0.0.1 is taken: stop the server there or choose another --port\n"
    )
    assert (done.returncode, done.stdout) == (1, "False\n")


def test_help_names_every_setting_and_loads_no_torch(tmp_path: Path) -> None:
    done = run("serve", "--help", home=tmp_path)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.endswith("False\n")
    words = set(done.stdout.replace("/", " ").split())
    flags = {flag for setting in SETTINGS.values() for flag in setting.flag.split("/")}
    assert flags | {"--config"} <= words


def test_nothing_asked_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("serve", "pull", "policies", "check", "--version"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"microbatch {microbatch.__version__}\n"


def test_the_package_is_the_command(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "microbatch", "--version"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"microbatch {microbatch.__version__}\n")


def test_pull_of_a_local_model_says_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert cli.main(["pull", str(tmp_path / "x.gguf")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_a_wrong_command_line_is_one_line_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--xyz"]) == 2
    assert capsys.readouterr().err == "microbatch: error: No such option: --xyz\n"


def test_policies_are_listed_with_their_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policies"]) == 0
    shown = capsys.readouterr().out
    assert "serial: one sequence at a time" in shown and "window: a batch closes" in shown
    assert "    --policy-arg window_ms=50.0\n" in shown


class Served:
    """Stands in for the server: keeps the settings it was given."""

    settings: Settings

    def __call__(self, settings: Settings) -> int:
        self.settings = settings
        return 0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """``serve`` without a server, a download, or a change to this process's log and environment."""
    server = Served()
    monkeypatch.setattr("microbatch.server.run_server", server)
    monkeypatch.setattr("microbatch.logs.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("microbatch.startup.prefer_passive_waiting", lambda: None)
    monkeypatch.setattr(sources, "fetch", lambda *_: sources.ModelFiles("none", Path("/nowhere")))
    for name in [name for name in os.environ if name.startswith("MICROBATCH_")]:
        monkeypatch.delenv(name)
    return server


def test_serve_hands_the_settings_on(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.ini").write_text("[microbatch]\nmax_queue = 9\n", encoding="utf-8")
    monkeypatch.setenv("MICROBATCH_WINDOW_MS", "7.5")
    arguments = ["--port", "0", "--api-key", "a", "--api-key", "b", "--no-prefix-cache", "--log-json"]
    assert cli.main(["serve", *arguments, "--config", str(tmp_path / "c.ini")]) == 0
    expected = Settings(port=0, api_key=("a", "b"), prefix_cache=False, log_json=True, max_queue=9, window_ms=7.5)
    assert served.settings == expected


def test_serve_with_no_flags_is_all_defaults(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microbatch.startup.check_port", lambda *_: None)
    assert cli.main(["serve"]) == 0
    assert served.settings == Settings()


def test_a_failure_of_the_server_is_one_line(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Settings) -> None:
        raise SetupError("no memory\nfor that")

    monkeypatch.setattr("microbatch.server.run_server", fail)
    assert cli.main(["serve", "--port", "0"]) == 1
    assert capsys.readouterr().err == "microbatch: error: no memory for that\n"


def test_an_interrupt_is_no_traceback(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: Settings) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("microbatch.server.run_server", interrupt)
    assert cli.main(["serve", "--port", "0"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> list[str]:
    """What ``pull`` asked for, by name; nothing is fetched."""
    calls: list[str] = []

    def record(name: str, result: Any) -> Any:
        def call(*arguments: object, **keywords: object) -> Any:
            calls.append(f"{name}{' force' if keywords.get('force') else ''}")
            return result

        return call

    monkeypatch.setattr(embedded, "ensure_embedded", record("ensure", empty_home / "folder"))
    monkeypatch.setattr(embedded, "verify_embedded", record("verify", 6))
    monkeypatch.setattr(hub, "download_folder", record("hub", empty_home / "hub"))
    return calls


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        ([], ["ensure"]),
        (["--force"], ["ensure force"]),
        (["--verify"], ["verify"]),
        (["--force", "--verify"], ["ensure force", "verify"]),
        (["owner/name"], ["hub"]),
        ([embedded.EMBEDDED_NAME], ["ensure"]),
    ],
)
def test_pull(pulled: list[str], arguments: list[str], calls: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", *arguments]) == 0
    assert pulled == calls
    assert Path(capsys.readouterr().out.strip()).is_absolute()


def test_check_reports_and_passes_without_the_model(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check"]) == 0
    shown = capsys.readouterr().out
    assert "torch" in shown and "device" in shown and str(empty_home) in shown and "not there yet" in shown


def test_check_fails_for_a_damaged_model(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embedded.embedded_folder(empty_home).mkdir(parents=True)
    assert cli.main(["check"]) == 1
    assert "! embedded model" in capsys.readouterr().out


def test_check_fails_for_a_missing_package(
    empty_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microbatch.diagnosis._version", lambda name: "" if name == "gguf" else "1")
    assert cli.main(["check"]) == 1
    assert "! gguf              missing:" in capsys.readouterr().out
