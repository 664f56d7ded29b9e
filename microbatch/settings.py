"""The one table of settings: name, type, default, bounds and help of each. Standard library only.

A field of ``Settings`` is a row of the table; the command line, the environment, the configuration file, the library's
keyword arguments and the README's table are all made from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args, get_origin, get_type_hints

from microbatch.errors import SetupError
from microbatch.key_file import add_key_file, check_keys


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. ``type`` is bool, int, float or str; ``optional``: None is a value; ``repeatable``: a tuple of texts.

    ``positional``: an argument of the command, not a flag. ``reads_file``: a text ``@FILE`` from the command line, the
    environment or the configuration file means the contents of FILE.
    """

    name: str
    type: type
    default: Any
    help: str
    metavar: str
    optional: bool = False
    repeatable: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    positional: bool = False
    reads_file: bool = False

    @property
    def flag(self) -> str:
        """``--max-queue``; for a bool also its negation, as typer writes it: ``--x/--no-x``."""
        if self.positional:
            return self.metavar
        words = self.name.replace("_", "-")
        return f"--{words}/--no-{words}" if self.type is bool else f"--{words}"

    @property
    def variable(self) -> str:
        """The environment variable: ``MICROBATCH_MAX_QUEUE``."""
        return f"MICROBATCH_{self.name.upper()}"

    @property
    def default_text(self) -> str:
        """The default for people; "" where there is none."""
        if self.default in (None, "", ()):
            return ""
        if self.type is bool:
            return "on" if self.default else "off"
        return f"{self.default:g}" if self.type is float else str(self.default)


def _row(default: Any, help: str, metavar: str = "", **more: Any) -> Any:
    """A field of ``Settings`` that carries its row; a key must never show in a ``repr``, so ``secret`` hides it."""
    secret = more.pop("secret", False)
    metavar = "|".join(more.get("choices", ())) or metavar
    return field(default=default, repr=not secret, metadata={"help": help, **more, "metavar": metavar})


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Every setting with its value, checked: a wrong one raises ``SetupError`` in one line."""

    model: str = _row(
        "",
        "Folder, GGUF file or hub name of the model. Without it: the embedded SmolLM2-135M-Instruct.",
        "MODEL",
        positional=True,
    )
    host: str = _row("127.0.0.1", "Address to listen on. 0.0.0.0 for all of them: set an API key then.", "ADDRESS")
    port: int = _row(8000, "Port to listen on. 0 for a free one.", "N", minimum=0, maximum=65535)
    served_model_name: tuple[str, ...] = _row((), "Name of the model in the API. May be repeated.", "NAME")
    api_key: tuple[str, ...] = _row(
        (),
        "Key that clients must send. May be repeated. Visible in the process list: prefer --api-key-file.",
        "KEY",
        secret=True,
    )
    api_key_file: str | None = _row(
        None, "File with one key a line, or 'name: key'; blank lines and # lines do not count.", "FILE"
    )
    rate_limit_requests: int | None = _row(
        None, "Most requests a minute of one API key, or of one address where there are no keys.", "N", minimum=1
    )
    rate_limit_tokens: int | None = _row(
        None, "Most tokens a minute, of prompts and answers, of one API key or address.", "N", minimum=1
    )
    max_n: int = _row(128, "Most choices of one request.", "N", minimum=1, maximum=128)
    max_stop: int = _row(16, "Most stop texts of one request.", "N", minimum=1, maximum=16)
    max_body_mb: int = _row(8, "Largest body of a request, in MiB.", "N", minimum=1, maximum=1024)
    cors_origin: tuple[str, ...] = _row(
        (), "Web origin whose pages may call the API; * for all. May be repeated.", "ORIGIN"
    )
    policy: str = _row("window", "Batching policy; `microbatch policies` lists them.", "NAME")
    policy_arg: tuple[str, ...] = _row((), "Argument of the policy. May be repeated.", "NAME=VALUE")
    max_batch_size: int = _row(8, "Most requests in a batch.", "N", minimum=1)
    window_ms: float = _row(
        50.0, "Longest wait of the oldest request for company, in milliseconds.", "MS", minimum=0, maximum=60_000
    )
    max_num_seqs: int = _row(64, "Most sequences that run at once, policy continuous.", "N", minimum=1)
    max_num_batched_tokens: int = _row(
        2048, "Most tokens in a step, policy continuous: long prompts are fed in chunks.", "N", minimum=16
    )
    max_model_len: int | None = _row(
        None, "Most tokens of prompt and output together, if less than the model's own limit.", "N", minimum=2
    )
    max_queue: int = _row(256, "Most requests that wait; beyond it clients get 429.", "N", minimum=1)
    queue_timeout_s: float | None = _row(None, "Longest wait in the queue, in seconds.", "S", minimum=0.001)
    request_timeout_s: float | None = _row(None, "Longest time for a whole request, in seconds.", "S", minimum=0.001)
    heartbeat_s: float = _row(
        15.0, "Seconds without an event after which a stream sends a comment. 0: never.", "S", minimum=0
    )
    send_timeout_s: float = _row(
        30.0, "Seconds after which a streaming client that takes nothing is dropped. 0: never.", "S", minimum=0
    )
    max_unread_tokens: int = _row(
        4096,
        "Most tokens of an answer that may wait for a slow streaming client; beyond it is dropped.",
        "N",
        minimum=1,
    )
    system_prompt: str | None = _row(
        None, "System prompt of every chat that brings none; its K/V is computed once.", "TEXT|@FILE", reads_file=True
    )
    chat_template: str | None = _row(
        None, "Jinja chat template instead of the model's own.", "TEXT|@FILE", reads_file=True
    )
    tool_parser: str = _row(
        "auto",
        "Form in which the model writes calls of tools. auto: as its chat template tells.",
        choices=("auto", "none", "hermes", "llama", "mistral", "harmony"),
    )
    dtype: str = _row(
        "auto",
        "Format of the weights. auto: float32 on a CPU, 16 bits on a GPU.",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    quantization: str = _row(
        "none",
        "Weights in 8 or 4 bits by bitsandbytes. auto: only if they do not fit otherwise.",
        choices=("none", "int8", "int4", "auto"),
    )
    device: str = _row("auto", "Where the model runs.", choices=("auto", "cpu", "cuda"))
    cpu_kernels: bool = _row(True, "Kernels in C on a CPU, built by the system's compiler at first use.")
    cpu_weights: str = _row(
        "float32",
        "What the C kernels keep weights as, on a CPU in float32: less is faster and less exact.",
        choices=("float32", "bfloat16", "int8"),
    )
    block_size: int = _row(16, "Tokens in a block of K/V memory.", "N", minimum=1, maximum=1024)
    kv_blocks: int | None = _row(None, "Blocks of K/V memory. Without it: as the free memory allows.", "N", minimum=1)
    kv_dtype: str = _row(
        "auto",
        "Format of K/V memory. auto: the model's own; fp8 and int8: 8 bits and a scale for each token and head.",
        choices=("auto", "fp8", "int8"),
    )
    memory_utilization: float = _row(
        0.80,
        "Share of memory to fill: of a GPU's for weights, activations and K/V, of a machine's free one for K/V.",
        "SHARE",
        minimum=0.05,
        maximum=0.98,
    )
    cuda_graphs: bool = _row(True, "On a GPU, record decode steps as CUDA graphs, policy continuous.")
    swap_space: float = _row(
        0.0,
        "Host memory for the K/V of sequences that lose their blocks. 0: their K/V is computed again.",
        "GIB",
        minimum=0,
    )
    prefix_cache: bool = _row(True, "Keep the K/V of prompt beginnings for requests that share them.")
    otlp_endpoint: str | None = _row(
        None, "Where to send OpenTelemetry traces (OTLP over HTTP); needs the extra otel.", "URL"
    )
    log_level: str = _row("info", "Least severe messages to log.", choices=("debug", "info", "warning", "error"))
    log_json: bool = _row(False, "Log one JSON object a line.")
    drain_timeout_s: float = _row(30.0, "After SIGTERM: seconds for running requests to finish.", "S", minimum=0)

    def __post_init__(self) -> None:
        for setting in SETTINGS.values():
            value = check_value(setting, getattr(self, setting.name), setting.name)
            object.__setattr__(self, setting.name, value)
        self.policy_arguments()

    def policy_arguments(self) -> dict[str, int | float | str]:
        """``policy_arg`` as names and values; a number where the text is one."""
        arguments: dict[str, int | float | str] = {}
        for text in self.policy_arg:
            name, equals, value = text.partition("=")
            if not equals or not name.isidentifier():
                raise SetupError(f"policy_arg must be NAME=VALUE, got {text!r}")
            arguments[name] = _number(value)
        return arguments

    def api_keys(self) -> dict[str, str]:
        """The keys given directly and those of ``api_key_file`` by the names of their clients. Reads the file."""
        keys = {f"key-{index}": key for index, key in enumerate(dict.fromkeys(self.api_key))}
        if self.api_key_file is not None:
            add_key_file(keys, read_text(self.api_key_file, "api_key_file"), self.api_key_file)
        check_keys(keys)
        return keys


def make_settings(values: Mapping[str, Any]) -> Settings:
    """``Settings`` of keyword arguments; an unknown name is refused with the nearest known one."""
    for name in values:
        require_known(name, "setting")
    return Settings(**values)


def require_known(name: str, what: str) -> None:
    """``SetupError`` for a name that is not in the table."""
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, n=1)
        raise SetupError(f"unknown {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def check_value(setting: Setting, value: Any, label: str) -> Any:
    """The value in the setting's own type; ``label`` is how the user wrote the setting."""
    if setting.repeatable:
        return _check_texts(value, label)
    if value is None and setting.optional:
        return None
    if setting.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not setting.type:
        raise SetupError(f"{label} must be {_KINDS[setting.type]}, got {value!r}")
    if setting.choices and value not in setting.choices:
        raise SetupError(f"{label} must be one of {', '.join(setting.choices)}, got {value!r}")
    if setting.type in (int, float):
        _check_bounds(setting, value, label)
    return value


def read_text(path: str, label: str) -> str:
    """A text file of the user's, UTF-8; ``SetupError`` names the setting that asked for it."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SetupError(f"{label}: file {path} is not UTF-8 text") from None
    except OSError as error:
        raise SetupError(f"{label}: cannot read file {path}: {error.strerror or error}") from None


def _check_texts(value: Any, label: str) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise SetupError(f"{label} must be a text or several, none of them empty")
    return tuple(texts)


def _check_bounds(setting: Setting, value: Any, label: str) -> None:
    low, high = setting.minimum, setting.maximum
    if math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high):
        return
    bounds = f"from {low:g} to {high:.15g}" if low is not None and high is not None else f"at least {low or 0:g}"
    raise SetupError(f"{label} must be {bounds}, got {value}")


def _number(text: str) -> int | float | str:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _build_table() -> dict[str, Setting]:
    hints = get_type_hints(Settings)
    rows = {}
    for item in dataclasses.fields(Settings):
        kind: Any = hints[item.name]
        repeatable = get_origin(kind) is tuple
        optional = isinstance(kind, types.UnionType)
        plain = get_args(kind)[0] if repeatable or optional else kind
        rows[item.name] = Setting(
            item.name, plain, item.default, optional=optional, repeatable=repeatable, **item.metadata
        )
    return rows


_KINDS: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
#: The table, in the order of the help and the README.
SETTINGS: Final[Mapping[str, Setting]] = _build_table()
