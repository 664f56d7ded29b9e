"""One door for model names: the embedded model, a local folder, a GGUF file, a name of the hub. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from microbatch.errors import SetupError
from microbatch.executor import embedded, hub
from microbatch.executor.packages import require_gguf, require_quantization
from microbatch.executor.progress import Progress, silent

Kind = Literal["embedded", "folder", "gguf", "hub"]


@dataclass(frozen=True, slots=True)
class Source:
    """What a name means. ``name``: to serve it under. ``path``: the folder or file of a local one."""

    kind: Kind
    name: str
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on the disk, ready to load: a transformers folder, or ``gguf_file`` in a folder."""

    name: str
    folder: Path
    gguf_file: str | None = None


def find_source(model: str | None) -> Source:
    """What ``model`` means: reads nothing but the local disk, and refuses in one line what cannot be a model."""
    if not model or model == embedded.EMBEDDED_NAME:
        return Source("embedded", embedded.EMBEDDED_NAME)
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return _local_folder(path)
    if path.is_file():
        return _local_file(path)
    if model.startswith(("/", ".", "~")) or model.endswith((".gguf", os.sep)) or not hub.is_hub_name(model):
        raise SetupError(f"model {model!r} does not exist: neither a folder, a GGUF file nor a hub name (owner/name)")
    return Source("hub", model)


def check_quantization(source: Source, quantization: str) -> None:
    """``SetupError`` when ``quantization`` cannot work for this model here, as far as that is known without torch."""
    require_quantization(quantization)
    if source.kind == "gguf" and quantization in ("int8", "int4"):
        raise SetupError(f"quantization {quantization} does not work on a GGUF file: give a model folder or a hub name")


def is_present(source: Source, home: Path) -> bool:
    """Whether loading would need no download."""
    if source.kind == "embedded":
        return embedded.embedded_folder(home).exists()
    return source.kind != "hub" or hub.cached_folder(source.name) is not None


def fetch(source: Source, home: Path, progress: Progress = silent, *, local_files_only: bool = False) -> ModelFiles:
    """Bring the model onto the disk if it is not there. ``SetupError`` says in one line why that failed."""
    if source.kind == "embedded":
        if local_files_only and not is_present(source, home):
            raise SetupError(f"the embedded model is not in {home}, and only local files are allowed")
        return ModelFiles(source.name, embedded.ensure_embedded(home, progress))
    if source.kind == "hub":
        return ModelFiles(source.name, hub.fetch_folder(source.name, progress, local_files_only=local_files_only))
    assert source.path is not None
    if source.kind == "gguf":
        return ModelFiles(source.name, source.path.parent, source.path.name)
    return ModelFiles(source.name, source.path)


def _local_folder(path: Path) -> Source:
    missing = hub.missing_files(path)
    if missing:
        files = sorted(path.glob("*.gguf"))
        hint = f" (to serve a GGUF file of it, name the file: {files[0]})" if files else ""
        raise SetupError(f"folder {path} is not a complete model: it has no {' and no '.join(missing[:3])}{hint}")
    return Source("folder", path.resolve().name, path)


def _local_file(path: Path) -> Source:
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise SetupError(f"file {path} is not a GGUF file: give a model folder, a GGUF file or a hub name")
    require_gguf()
    return Source("gguf", path.stem, path)
