"""Building the C kernels: what goes wrong is said, and nothing is built twice."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from microbatch_kernels import cpu_library
from microbatch_kernels.cpu_library import CompileError
from microbatch_kernels.dispatch import choose_backend

build: Callable[[Path], ctypes.CDLL] = cpu_library.cpu_library.__wrapped__


def compiler(folder: Path, text: str) -> str:
    """A program in the place of a compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def real_compiler() -> str:
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, "echo 'linear.c: no vectors here' >&2; exit 3"))
    folder = tmp_path / "built"
    with pytest.raises(CompileError, match="compiler failed: linear.c: no vectors here"):
        build(folder)
    assert not list(folder.iterdir()), "nothing half made is left"


@pytest.mark.parametrize("name", ["/not/there/cc", "not-there-cc -m64"])
def test_a_compiler_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", name)
    with pytest.raises(CompileError, match=r"cannot build the C kernels in .*not[-/]there"):
        build(tmp_path)


def test_no_compiler_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match="no C compiler: install gcc, or name one in the environment variable CC"):
        build(tmp_path / "built")


def test_a_compiler_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(cpu_library, "_COMPILE_TIMEOUT_S", 0.05)
    with pytest.raises(CompileError, match="timed out"):
        build(tmp_path / "built")


def test_the_second_call_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "calls"
    monkeypatch.setenv("CC", compiler(tmp_path, f'echo . >> {log}\nexec {real_compiler()} "$@"'))
    folder = tmp_path / "built"
    widths = [build(folder).microbatch_panel_width() for _ in range(2)]
    assert widths[0] == widths[1] > 0
    assert log.read_text() == ".\n"
    assert [path.suffix for path in folder.iterdir()] == [".so"], "no scratch is left beside it"


def test_a_build_goes_by_sources_flags_and_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {cpu_library._fingerprint("cc"), cpu_library._fingerprint("clang")}
    monkeypatch.setattr(cpu_library, "_processor", lambda: "another")
    names.add(cpu_library._fingerprint("cc"))
    monkeypatch.setattr(cpu_library, "_FLAGS", ("-O0",))
    names.add(cpu_library._fingerprint("cc"))
    sources = shutil.copytree(cpu_library._SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(cpu_library, "_SOURCES", sources)
    assert cpu_library._fingerprint("cc") in names
    with (sources / "vector.h").open("a") as header:
        header.write("/* changed */\n")
    names.add(cpu_library._fingerprint("cc"))
    assert len(names) == 5


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CompileError, match=f"cannot build the C kernels in {tmp_path}/file/kernels"):
        build(tmp_path / "file/kernels")


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be made or removed any more. Permissions would not stop the tests of the superuser."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)


def test_a_folder_that_cannot_be_written_serves_the_build_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path)
    read_only(monkeypatch)
    assert build(tmp_path).microbatch_panel_width() > 0
    cut_short(tmp_path)
    with pytest.raises(CompileError, match=f"cannot build the C kernels in {tmp_path}: .*Read-only"):
        build(tmp_path)


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = 'while [ "$1" != -o ]; do shift; done; echo half > "$2"'
    folder = tmp_path / "built"
    monkeypatch.setenv("CC", compiler(tmp_path, f"{full}; echo 'No space left on device' >&2; exit 1"))
    with pytest.raises(CompileError, match="compiler failed: No space left on device"):
        build(folder)
    monkeypatch.setenv("CC", compiler(tmp_path, full))
    with pytest.raises(CompileError, match="cannot load .*kernels-"):
        build(folder)
    assert not list(folder.iterdir()), "a build that cannot be loaded gets no name"


def test_two_that_build_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiler waits for the other one to have begun."""
    both = f"echo . >> {tmp_path}/begun; until [ $(wc -l < {tmp_path}/begun) -ge 2 ]; do sleep 0.02; done"
    monkeypatch.setenv("CC", compiler(tmp_path, f'{both}\nexec {real_compiler()} "$@"'))
    folder = tmp_path / "built"
    with ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(build, [folder] * 2))
    assert {library.microbatch_panel_width() for library in libraries} == {build(folder).microbatch_panel_width()}
    assert (tmp_path / "begun").read_text() == ".\n" * 2, "the third call has built nothing"
    assert {path.suffix for path in folder.iterdir()} == {".so"}


def cut_short(folder: Path) -> Path:
    """Put the first half of the only build in its place: a new file, for the old one is in use."""
    (path,) = folder.glob("*.so")
    content = path.read_bytes()
    half = path.with_suffix(".half")
    half.write_bytes(content[: len(content) // 2])
    return half.replace(path)


def test_a_damaged_build_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "calls"
    monkeypatch.setenv("CC", compiler(tmp_path, f'echo . >> {log}\nexec {real_compiler()} "$@"'))
    folder = tmp_path / "built"
    build(folder)
    path = cut_short(folder)
    assert build(folder).microbatch_panel_width() > 0
    assert f"{path} is damaged" in caplog.text
    (sound,) = folder.iterdir()
    build(folder)
    assert log.read_text() == ".\n" * 2 and sound.exists()


@pytest.mark.parametrize("content", [b"", b"\x7fELF and no more", b"text"])
def test_a_build_that_cannot_be_loaded_is_named(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its content is what its name says, so it is not damaged: another build would be no better."""
    monkeypatch.setenv("CC", compiler(tmp_path, "exit 1"))
    (tmp_path / "made").write_bytes(content)
    name = cpu_library._named(f"kernels-{cpu_library._fingerprint(os.environ['CC'])}", tmp_path / "made")
    path = (tmp_path / "made").rename(tmp_path / name)
    with pytest.raises(CompileError, match=f"cannot load {path}"):
        build(tmp_path)


@pytest.mark.parametrize("made", [True, False])
def test_sources_that_are_not_there(made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "_SOURCES", tmp_path / "csrc")
    if made:
        (tmp_path / "csrc").mkdir()
    with pytest.raises(CompileError, match=f"are not in {tmp_path}/csrc: install microbatch again"):
        build(tmp_path / "built")


def test_auto_warns_once_and_takes_torch_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, "echo broken >&2; exit 1"))
    with caplog.at_level(logging.INFO):
        assert choose_backend("auto", folder=tmp_path / "built").name == "torch"
    (warning,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "broken; torch operators serve instead" in warning.getMessage()
    with pytest.raises(ValueError, match="'cpu' cannot be had: .*broken"):
        choose_backend("cpu", folder=tmp_path / "built")


def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    command = [*real_compiler().split(), *cpu_library._FLAGS, "-O0", "-Wall", "-Wextra", "-Werror"]
    sources = map(str, sorted(cpu_library._SOURCES.glob("*.c")))
    done = subprocess.run([*command, "-o", str(tmp_path / "all.so"), *sources, "-lm"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
