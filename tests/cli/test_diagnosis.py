"""``microbatch check``, finding by finding."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from microbatch.diagnosis import Finding, examine


def findings(home: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(home)}


def test_a_sound_machine_has_no_fault(tmp_path: Path) -> None:
    found = findings(tmp_path / "not" / "yet")
    assert [finding for finding in found.values() if not finding.ok] == []
    assert "GB free" in found["model folder"].value
    assert {"torch", "transformers", "bitsandbytes", "pip", "device", "python"} <= set(found)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = findings(tmp_path)["model folder"]
    assert not found.ok and "set MICROBATCH_HOME" in found.value


def test_a_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = findings(tmp_path)["device"]
    assert not found.ok and "torch cannot be imported" in found.value


def test_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="RTX 3090", total_memory=24e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert findings(tmp_path)["device"] == Finding("device", "cuda, RTX 3090, 24 GB")


@pytest.mark.model
def test_the_embedded_model_is_found(home: Path, embedded_model: Path) -> None:
    assert findings(home)["embedded model"].value.endswith(f"in {embedded_model}")


def test_an_unknown_package_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microbatch.diagnosis._PACKAGES", ("no-such-package",))
    found = findings(tmp_path)["no-such-package"]
    assert not found.ok and found.value.endswith("-m pip install no-such-package")
