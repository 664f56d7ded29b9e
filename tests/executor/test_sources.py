"""One door for model names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from microbatch.errors import SetupError
from microbatch.executor import hub, sources
from microbatch.executor.embedded import EMBEDDED_NAME, embedded_folder
from microbatch.executor.sources import ModelFiles, check_quantization, fetch, find_source, is_present


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that has the files of a model, by name."""
    path = tmp_path / "my-model"
    path.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (path / name).touch()
    return path


@pytest.mark.parametrize("name", [None, "", EMBEDDED_NAME])
def test_the_embedded_model_has_three_names(name: str | None) -> None:
    source = find_source(name)
    assert (source.kind, source.name) == ("embedded", EMBEDDED_NAME)


def test_a_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_source(str(folder))
    assert (source.kind, source.name) == ("folder", "my-model")
    assert fetch(source, tmp_path) == ModelFiles("my-model", folder)
    assert is_present(source, tmp_path)
    monkeypatch.chdir(folder)
    assert find_source(".").name == "my-model"


def test_a_folder_goes_before_a_hub_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert find_source("my-model").kind == "folder"


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "some.Q4.gguf"
    path.write_bytes(b"GGUF\x03")
    source = find_source(str(path))
    assert (source.kind, source.name) == ("gguf", "some.Q4")
    assert fetch(source, tmp_path) == ModelFiles("some.Q4", tmp_path, "some.Q4.gguf")


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "gpt2", "a.b/c_d-e"])
def test_a_hub_name(name: str) -> None:
    assert find_source(name) == sources.Source("hub", name)


@pytest.mark.parametrize(
    "name", ["./x", "../x/y", "/x", "~/x", "a/b/c", "x.gguf", "a b", "a/b\n", "é/x", "a/", "a--b/c"]
)
def test_what_can_be_no_model_is_refused(name: str) -> None:
    with pytest.raises(SetupError, match="does not exist: neither a folder, a GGUF file nor a hub name"):
        find_source(name)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused_by_name(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(SetupError, match=f"not a complete model: it has no {missing}$"):
        find_source(str(folder))


def test_a_folder_that_lacks_a_shard_is_refused_by_name(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}', encoding="utf-8")
    (folder / "model-1.safetensors").touch()
    with pytest.raises(SetupError, match="it has no model-2.safetensors$"):
        find_source(str(folder))
    index.write_text("{", encoding="utf-8")
    with pytest.raises(SetupError, match="index.json is corrupt"):
        find_source(str(folder))


def test_a_folder_of_gguf_files_says_to_name_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(SetupError, match=r"name the file: .*a\.gguf"):
        find_source(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x00")
    with pytest.raises(SetupError, match="is not a GGUF file"):
        find_source(str(path))


def test_packages_are_asked_for_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    gguf, folder = find_source(str(path)), sources.Source("folder", "x", tmp_path)
    check_quantization(folder, "int8")
    with pytest.raises(SetupError, match="int8 does not work on a GGUF file"):
        check_quantization(gguf, "int8")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else object())
    check_quantization(folder, "none")
    with pytest.raises(SetupError, match="quantization int4 needs bitsandbytes: pip install bitsandbytes"):
        check_quantization(folder, "int4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="loading a model needs accelerate: pip install accelerate"):
        check_quantization(folder, "none")
    with pytest.raises(SetupError, match="pip install gguf"):
        find_source(str(path))


def test_presence_of_the_embedded_model(tmp_path: Path) -> None:
    source = find_source("")
    assert not is_present(source, tmp_path)
    with pytest.raises(SetupError, match="only local files are allowed"):
        fetch(source, tmp_path, local_files_only=True)
    embedded_folder(tmp_path).mkdir(parents=True)
    assert is_present(source, tmp_path)


def test_a_hub_name_is_fetched_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_source("owner/name")
    monkeypatch.setattr(hub, "cached_folder", lambda name: None)
    assert not is_present(source, tmp_path)
    monkeypatch.setattr(hub, "cached_folder", lambda name: tmp_path)
    assert is_present(source, tmp_path)
    assert fetch(source, tmp_path) == ModelFiles("owner/name", tmp_path)
