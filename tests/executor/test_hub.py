"""Hub names: the cache first, then the hub, and each way to fail in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from microbatch.errors import SetupError
from microbatch.executor import hub

FILES = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "README.md",
    "onnx/model.onnx",
    "original/model.safetensors",
]
COMMIT = "0123456789" * 4


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_in_cache(cache: Path, *files: str) -> Path:
    """A snapshot of ``owner/name`` with these files, laid out as the hub's library does."""
    storage = cache / "models--owner--name"
    snapshot = storage / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    for file in files:
        (snapshot / file).write_text("{}", encoding="utf-8")
    return snapshot


@dataclass
class FakeFile:
    rfilename: str


@dataclass
class FakeHub:
    """What the hub answers: files, or an error for the listing or the download."""

    files: list[str] = field(default_factory=lambda: list(FILES))
    error: Exception | None = None
    download_error: Exception | None = None
    wanted: list[str] = field(default_factory=list)
    bars: list[bool] = field(default_factory=list)
    folder: Path = Path("/snapshot")
    sha: str = COMMIT

    @property
    def siblings(self) -> list[FakeFile]:
        return [FakeFile(name) for name in self.files]

    def model_info(self, name: str, timeout: float) -> FakeHub:
        assert timeout <= 10
        if self.error is not None:
            raise self.error
        return self

    def snapshot_download(self, name: str, revision: str, allow_patterns: list[str]) -> str:
        from huggingface_hub.utils.tqdm import are_progress_bars_disabled

        self.bars.append(not are_progress_bars_disabled())
        if self.download_error is not None:
            raise self.download_error
        assert revision == COMMIT
        self.wanted = allow_patterns
        return str(self.folder)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


class Response:
    """As much of an HTTP answer as the errors of the hub's library read."""

    headers: dict[str, str] = {}
    request = None
    status_code = 500


def http_error(kind: type[Exception], text: str) -> Exception:
    make: Any = kind
    error: Exception = make(text, response=Response())
    return error


def test_a_cached_model_needs_no_hub(cache: Path) -> None:
    snapshot = put_in_cache(cache, "config.json", "model.safetensors", "tokenizer.json")
    assert hub.cached_folder("owner/name") == snapshot
    assert hub.fetch_folder("owner/name", local_files_only=True) == snapshot
    assert hub.fetch_folder("owner/name") == snapshot, "HF_HUB_OFFLINE is set in tests: the hub was not asked"


def test_a_half_cached_model_does_not_count(cache: Path) -> None:
    put_in_cache(cache, "config.json")
    assert hub.cached_folder("owner/name") is None
    with pytest.raises(SetupError, match="only local files are allowed"):
        hub.fetch_folder("owner/name", local_files_only=True)


def test_offline_and_unknown_is_one_line(cache: Path) -> None:
    with pytest.raises(SetupError, match="'owner/name' is not in the local cache and HF_HUB_OFFLINE is set") as caught:
        hub.fetch_folder("owner/name")
    assert "\n" not in caught.value.message


def test_only_what_is_loaded_is_downloaded(fake: FakeHub) -> None:
    assert hub.fetch_folder("owner/name") == Path("/snapshot")
    assert fake.wanted == ["model.safetensors", "config.json", "tokenizer.json", "additional_chat_templates/*"]


def test_the_hubs_own_bars_are_hidden_without_a_terminal_and_come_back(fake: FakeHub) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    before = are_progress_bars_disabled()
    hub.download_folder("owner/name")
    assert fake.bars == [False]
    assert are_progress_bars_disabled() == before


def test_shards_and_old_formats_are_selected() -> None:
    shards = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    index = "model.safetensors.index.json"
    files = hub.select_files("x", ["config.json", index, *shards, "pytorch_model.bin", "consolidated.safetensors"])
    assert files[:2] == shards and index in files and "pytorch_model.bin" not in files
    assert "pytorch_model.bin" in hub.select_files("x", ["config.json", "pytorch_model.bin"])


def test_a_repository_of_gguf_files_is_explained(fake: FakeHub) -> None:
    fake.files = ["config.json", "a.gguf"]
    with pytest.raises(SetupError, match="holds GGUF files: download one and serve the file"):
        hub.fetch_folder("owner/name")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.RepositoryNotFoundError, "404"), "there is no model 'owner/name' on the hub"),
        (http_error(errors.GatedRepoError, "403"), "is gated: accept its terms"),
        (
            http_error(errors.HfHubHTTPError, "500 Server Error\nmore"),
            r"the hub refused model 'owner/name' \(500 Server",
        ),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        (ConnectionError("[Errno -2] Name or service not known"), "the hub cannot be reached"),
        (RuntimeError(), r"the hub cannot be reached \(RuntimeError\)"),
        (OSError(28, "No space left on device"), "cannot keep model 'owner/name' in the cache"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_every_failure_is_one_line(fake: FakeHub, error: Exception, message: str, late: bool) -> None:
    if late:
        fake.download_error = error
    else:
        fake.error = error
    with pytest.raises(SetupError, match=message) as caught:
        hub.fetch_folder("owner/name")
    assert "\n" not in caught.value.message
