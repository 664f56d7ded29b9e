"""What a finished model folder must hold: the size and the sha256 of each file, kept in the folder itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from microbatch.errors import SetupError
from microbatch.executor.progress import Progress, silent

#: The name of the record in the folder.
MANIFEST: Final = "manifest.json"
#: Raised when the way a folder is made changes, so that an old folder is not taken for a new one.
FORMAT: Final = 1
#: What to do about a damaged folder, for every message here.
REMEDY: Final = "run `microbatch pull --force` to make it again"

_CHUNK = 1 << 20


def sha256_of(path: Path, progress: Progress = silent, stage: str = "checking") -> str:
    """The sha256 of a file, in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(stage, done, total)
    return digest.hexdigest()


def write_manifest(folder: Path, facts: Mapping[str, str], progress: Progress = silent) -> None:
    """Record every file of ``folder`` and ``facts`` about its origin, and bring all of it to the disk.

    Without the flush a power cut soon after the rename could leave files of the right size with nothing in them.
    """
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        stage = f"recording {path.name}"
        files[path.relative_to(folder).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": sha256_of(path, progress, stage),
        }
        _flush(path)
    record = {"format": FORMAT, **facts, "files": files}
    (folder / MANIFEST).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    _flush(folder / MANIFEST)
    _flush(folder)


def check_sizes(folder: Path) -> None:
    """Compare the files with the record by size (no reading); ``SetupError`` names the first that is wrong."""
    for name, expected in _read_files(folder).items():
        path = folder / name
        if not path.is_file():
            raise SetupError(f"model file {path} is missing: {REMEDY}")
        size = path.stat().st_size
        if size != expected["size"]:
            raise SetupError(f"model file {path} has {size} bytes instead of {expected['size']}: {REMEDY}")


def check_hashes(folder: Path, progress: Progress = silent) -> int:
    """Compare sizes and contents; returns how many files. ``SetupError`` names the first that is wrong."""
    check_sizes(folder)
    files = _read_files(folder)
    for name, expected in files.items():
        if sha256_of(folder / name, progress, f"checking {name}") != expected["sha256"]:
            raise SetupError(f"model file {folder / name} is corrupt (its sha256 is wrong): {REMEDY}")
    return len(files)


def _read_files(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / MANIFEST
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = record["files"]
        made_by = record["format"]
        well_formed = bool(files) and all({"size", "sha256"} <= set(entry) for entry in files.values())
    except FileNotFoundError:
        raise SetupError(f"model file {path} is missing: {REMEDY}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SetupError(f"model file {path} is corrupt: {REMEDY}") from None
    if not well_formed:
        raise SetupError(f"model file {path} is corrupt: {REMEDY}")
    if made_by != FORMAT:
        raise SetupError(f"model folder {folder} was made by another version of microbatch: {REMEDY}")
    return files


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
