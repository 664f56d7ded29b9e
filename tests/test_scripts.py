"""The developer's scripts: what they ask of pip, and what they say when they cannot go on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ("check", "coverage", "install", "lint", "serve", "test")

# Stands in for the virtual environment's Python: notes what it is asked, and answers what pip would.
PYTHON = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
    *--report*) echo "\\"version\\": \\"$OFFERED\\"" ;;
    *importlib.metadata*) echo "$INSTALLED" ;;
esac
"""


class Checkout:
    """A copy of the scripts beside a virtual environment whose Python only takes notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        for name in ("setup.cfg", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        self.tool(folder / "venv/bin/python", PYTHON)
        self.tool(folder / "tools/uname", "#!/bin/sh\necho Linux x86_64\n")

    def tool(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, offered: str = "2.13.0", installed: str = "") -> list[str]:
        """Run a script; what it asked of pip since the last time, less what it did not decide itself."""
        environment = {
            "PATH": f"{self.folder}/tools:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.folder / "venv"),
            "LOG": str(self.log),
            "OFFERED": offered,
            "INSTALLED": installed,
        }
        self.log.write_text("", "utf-8")
        command = [str(self.folder / "scripts" / script), *arguments]
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        asked = (line for line in self.log.read_text("utf-8").splitlines() if line.startswith("-m pip install"))
        return [line.removeprefix("-m pip install -qq ") for line in asked if "--dry-run" not in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def pinned_torch() -> str:
    (line,) = [
        line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line.startswith("torch==")
    ]
    return line.removeprefix("torch==")


without_nvidia = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
    reason="the installer takes the default build of torch where there is an NVIDIA driver",
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_can_be_run_and_says_what_it_does(name: str) -> None:
    script = ROOT / "scripts" / name
    assert os.access(script, os.X_OK)
    first, second, *rest = script.read_text("utf-8").splitlines()
    assert first == "#!/usr/bin/env bash"
    assert second.startswith("# ")
    assert "set -eu" in rest


@without_nvidia
def test_install_takes_the_cpu_build_of_torch_where_there_is_no_nvidia_driver(checkout: Checkout) -> None:
    assert checkout.run("install", offered=pinned_torch()) == [
        f"--no-deps --index-url https://download.pytorch.org/whl/cpu torch=={pinned_torch()}",
        "-c constraints.txt -e .[dev]",
    ]


def test_install_takes_the_build_that_pip_was_told_of(checkout: Checkout) -> None:
    assert checkout.run("install", offered=f"{pinned_torch()}+cpu") == ["-c constraints.txt -e .[dev]"]


def test_install_keeps_a_torch_that_is_there(checkout: Checkout) -> None:
    assert checkout.run("install", installed=pinned_torch()) == ["-c constraints.txt -e .[dev]"]


def test_install_does_nothing_until_something_changed(checkout: Checkout) -> None:
    light = "-c constraints.txt -e ."
    assert checkout.run("install", "--no-dev", installed=pinned_torch()) == [light]
    assert checkout.run("install", "--no-dev") == []
    assert checkout.run("install", installed=pinned_torch()) == [f"{light}[dev]"]
    assert checkout.run("install") == []
    assert checkout.run("install", "--no-dev") == []
    with (checkout.folder / "setup.cfg").open("a") as file:
        file.write("# changed\n")
    assert checkout.run("install", "--no-dev", installed=pinned_torch()) == [light]


def test_serve_installs_and_hands_its_arguments_on(checkout: Checkout) -> None:
    checkout.tool(checkout.folder / "venv/bin/microbatch", '#!/bin/sh\necho "-m pip install -qq serve: $*" >>"$LOG"\n')
    assert checkout.run("serve", "model name", "--port", "9", installed=pinned_torch()) == [
        "-c constraints.txt -e .",
        "serve: serve model name --port 9",
    ]


def test_install_refuses_an_argument_it_does_not_know() -> None:
    done = subprocess.run([ROOT / "scripts/install", "--fast"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "scripts/install: unknown argument '--fast'; known: --no-dev\n"


def test_install_names_what_is_missing(checkout: Checkout) -> None:
    tools = checkout.folder / "few"
    tools.mkdir()
    for tool in ("bash", "dirname"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        [checkout.folder / "scripts/install"], env={"PATH": str(tools)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "scripts/install: needs Python 3.11 or newer on the PATH, found none.\n"
