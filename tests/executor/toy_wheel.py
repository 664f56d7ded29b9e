"""A small wheel in the place of the embedded model's, and a conversion that takes no time."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

from microbatch.executor.download import Wheel
from microbatch.executor.embedded import EmbeddedModel
from microbatch.executor.progress import Progress

NAME, FILE = "toy_model", "toy_model-1.0-py3-none-any.whl"
GGUF = b"GGUF" + bytes(range(256)) * 40


def build_wheel(folder: Path) -> Path:
    """A real wheel that pip accepts, with one member ``toy_model/toy.gguf``."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\nRequires-Dist: nothing-like-it\n"
    tags = "Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members = {
        f"{NAME}/__init__.py": b"",
        f"{NAME}/toy.gguf": GGUF,
        f"{NAME}-1.0.dist-info/METADATA": metadata.encode(),
        f"{NAME}-1.0.dist-info/WHEEL": tags.encode(),
        f"{NAME}-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(folder / FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return folder / FILE


def toy_model(wheel: Path) -> EmbeddedModel:
    """The description of the wheel at ``wheel``, its sha256 included."""
    data = wheel.read_bytes()
    described = Wheel(
        requirement="toy-model==1.0",
        filename=wheel.name,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        member=f"{NAME}/toy.gguf",
        member_size=len(GGUF),
    )
    return EmbeddedModel(name="owner/Toy", version="1.0", wheel=described, needed_bytes=1000)


class CopyDownload:
    """Downloads by copying ``source``; counts how often."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.calls = 0

    def __call__(self, wheel: Wheel, folder: Path, progress: Progress) -> None:
        self.calls += 1
        shutil.copy(self.source, folder / wheel.filename)
        progress("downloading", wheel.size, wheel.size)


def copy_convert(gguf: Path, folder: Path) -> None:
    """A "conversion" that writes two files, one of them the GGUF's bytes."""
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
