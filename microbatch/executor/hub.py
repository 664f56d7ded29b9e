"""Models of the Hugging Face hub: what is in the local cache is used as it is; what is not is fetched once.

Loading never asks the hub again, so a cached model starts without a network, and at once.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from microbatch.errors import SetupError
from microbatch.executor.progress import Progress, silent
from microbatch.executor.quiet import first_line

#: Seconds to wait for the hub's first answer.
_TIMEOUT_S: Final = 10.0
_HUB_NAME: Final = re.compile(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)
_TEXT_SUFFIXES: Final = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def is_hub_name(name: str) -> bool:
    """Whether ``name`` has the form of a hub name (``owner/name`` or a bare old one)."""
    return _HUB_NAME.fullmatch(name) is not None and "--" not in name and ".." not in name


def cached_folder(name: str) -> Path | None:
    """The folder of ``name`` in the local cache when all files that loading needs are there; no network."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return None if missing_files(folder) else folder


def fetch_folder(name: str, progress: Progress = silent, *, local_files_only: bool = False) -> Path:
    """The folder of ``name``, downloaded when the cache has no complete copy; ``SetupError`` in one line otherwise."""
    folder = cached_folder(name)
    if folder is not None:
        return folder
    if local_files_only:
        raise SetupError(f"model {name!r} is not in the local cache, and only local files are allowed")
    return download_folder(name, progress)


def download_folder(name: str, progress: Progress = silent) -> Path:
    """Bring ``name`` in its present form into the cache (files that are there already are not sent again)."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide_bars = (progress is silent or not sys.stderr.isatty()) and not are_progress_bars_disabled()
    if hide_bars:
        disable_progress_bars()
    try:
        listed = HfApi().model_info(name, timeout=_TIMEOUT_S)
        wanted = select_files(name, [file.rfilename for file in listed.siblings or ()])
        progress(f"downloading {name}", 0, 0)
        return Path(snapshot_download(name, revision=listed.sha, allow_patterns=wanted))
    except SetupError:
        raise
    except Exception as error:  # the hub's own errors, and whatever its HTTP library of the day raises
        raise SetupError(_explain(name, error)) from error
    finally:
        if hide_bars:
            enable_progress_bars()


def select_files(name: str, files: Iterable[str]) -> list[str]:
    """Of a repository's files those that transformers loads: no second copies in other formats or sub-folders."""
    top = [file for file in files if "/" not in file]
    weights = [f for f in top if f.startswith("model") and f.endswith(".safetensors")]
    weights = weights or [f for f in top if f.startswith("pytorch_model") and f.endswith(".bin")]
    if "config.json" not in top or not weights:
        hint = (
            " (it holds GGUF files: download one and serve the file)" if any(f.endswith(".gguf") for f in top) else ""
        )
        raise SetupError(f"{name!r} on the hub is not a model that transformers can load{hint}")
    return weights + [f for f in top if f.endswith(_TEXT_SUFFIXES)] + ["additional_chat_templates/*"]


def missing_files(folder: Path) -> list[str]:
    """The names of files without which ``folder`` cannot be loaded; empty when it is complete."""
    missing = [] if (folder / "config.json").exists() else ["config.json"]
    for weights in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{weights}.index.json"
        if index.exists():
            missing += [shard for shard in _shards(index) if not (folder / shard).exists()]
            break
        if (folder / weights).exists():
            break
    else:
        missing.append("model.safetensors")
    if not any((folder / file).exists() for file in _TOKENIZER_FILES):
        missing.append("tokenizer.json")
    return missing


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        raise SetupError(f"model file {index} is corrupt: get it again") from None


def _explain(name: str, error: Exception) -> str:
    """One line for what the hub's library raised: what, why, what to do."""
    from huggingface_hub import errors

    offline = "use a cached model, a local folder or a GGUF file, or leave MODEL out for the embedded one"
    if isinstance(error, errors.GatedRepoError):
        return f"model {name!r} is gated: accept its terms on the hub, then set HF_TOKEN (or `hf auth login`)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no model {name!r} on the hub (or it is private and HF_TOKEN is not set): check the name"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"model {name!r} is not in the local cache and HF_HUB_OFFLINE is set: {offline}"
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub refused model {name!r} ({first_line(error)}): try again later"
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return f"cannot keep model {name!r} in the cache ({first_line(error)}): check the disk, or set HF_HOME"
    return f"model {name!r} is not in the local cache and the hub cannot be reached ({first_line(error)}): {offline}"
