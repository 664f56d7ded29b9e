"""The layers of the project: who may import whom, and what a pure package must never load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {"microbatch": ROOT / "microbatch", "microbatch_kernels": ROOT / "kernels/microbatch_kernels"}
MAX_LINES = 300

LEDGER = tuple(
    f"microbatch_kernels.{name}"
    for name in ("blocks", "cached_pool", "manager", "metadata", "prefix", "statistics", "swap_space", "tables")
)
CLOCK_AND_CHANCE = ("asyncio", "random", "secrets", "threading", "time")


@dataclass(frozen=True)
class Layer:
    """What modules under ``names`` may import: of our own packages ``own``, of others ``libraries`` (None: any)."""

    names: tuple[str, ...]
    own: tuple[str, ...] = ()
    libraries: tuple[str, ...] | None = ()
    never: tuple[str, ...] = ()


CORE = ("microbatch.core", "microbatch.errors")
SETTINGS = ("microbatch.key_file", "microbatch.settings", "microbatch.settings_sources")
TOP = (
    *("__init__", "__main__", "cli", "connection", "deploy", "diagnosis", "llm", "logs", "progress", "server"),
    *("startup", "wiring"),
)
HUGGING_FACE = ("accelerate", "bitsandbytes", "gguf", "huggingface_hub", "safetensors", "tokenizers", "transformers")

# The first layer whose name is the module's or a parent's is the module's.
LAYERS = (
    Layer(("microbatch.core", "microbatch.errors"), own=CORE, never=CLOCK_AND_CHANCE),
    Layer(LEDGER, own=LEDGER, never=CLOCK_AND_CHANCE),
    Layer(("microbatch_kernels",), own=("microbatch_kernels",), libraries=("torch", "triton")),
    Layer(("microbatch.sim",), own=(*CORE, *LEDGER)),
    Layer(("microbatch.text",), own=(*CORE, "microbatch.text"), libraries=("jinja2", "llguidance", *HUGGING_FACE)),
    Layer(
        ("microbatch.executor",),
        own=(*CORE, "microbatch.executor", "microbatch_kernels"),
        libraries=("torch", *HUGGING_FACE),
        never=("asyncio",),
    ),
    Layer(("microbatch.engine",), own=(*CORE, "microbatch.engine"), libraries=("anyio",)),
    Layer(
        ("microbatch.jobs",),
        own=(*CORE, "microbatch.engine", "microbatch.jobs", "microbatch.text"),
        libraries=("anyio",),
    ),
    Layer(SETTINGS, own=(*CORE, *SETTINGS)),
    Layer(
        ("microbatch.api",),
        own=(*CORE, "microbatch.api", "microbatch.engine", "microbatch.jobs", "microbatch.text", *SETTINGS),
        libraries=("anyio", "msgspec", "opentelemetry", "prometheus_client", "starlette"),
    ),
    Layer(
        tuple(f"microbatch.{name}" for name in TOP),
        own=("microbatch", "microbatch_kernels"),
        libraries=None,
    ),
)

# Packages that must import without a device library, each tried in a process of its own.
LIGHT = {
    "microbatch": ("torch", "transformers", "starlette", "asyncio"),
    "microbatch.api": ("torch", "transformers"),
    "microbatch.cli": ("torch", "transformers", "starlette"),
    "microbatch.core": ("torch", "transformers", "anyio", "asyncio"),
    "microbatch.engine": ("torch", "transformers", "starlette"),
    "microbatch.errors": ("torch", "transformers", "anyio", "asyncio"),
    "microbatch.jobs": ("torch", "transformers", "starlette"),
    "microbatch.settings": ("torch", "transformers", "starlette"),
    "microbatch.sim": ("torch", "transformers", "anyio", "asyncio"),
    "microbatch.text": ("torch", "transformers"),
    **{name: ("torch", "transformers", "anyio", "asyncio", "microbatch") for name in LEDGER},
}


def modules() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    found = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def is_under(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def layer_of(module: str) -> Layer:
    name = f"{module}.__init__" if module in SOURCES else module
    for layer in LAYERS:
        if is_under(name, layer.names):
            return layer
    raise LookupError(f"{module} is in no layer")


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Every module that ``module`` imports anywhere in its text, with the line."""
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield (name if name in MODULES or name == "microbatch.__version__" else node.module), node.lineno


def may_import(layer: Layer, name: str) -> bool:
    root = name.partition(".")[0]
    if root in SOURCES:
        return is_under(name, layer.own) or name == "microbatch.__version__"
    if is_under(name, layer.never):
        return False
    return root in sys.stdlib_module_names or layer.libraries is None or root in layer.libraries


def test_the_coverage_gate_holds_for_every_pure_module() -> None:
    script = (ROOT / "scripts/coverage").read_text("utf-8")
    assert all(f"$ledger/{name.partition('.')[2]}.py" in script for name in LEDGER)
    assert "microbatch/core/*" in script and "microbatch/errors.py" in script


def test_every_module_is_found() -> None:
    assert {"microbatch", "microbatch.core.scheduler", "microbatch_kernels.store"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_what_its_layer_may(module: str) -> None:
    layer = layer_of(module)
    wrong = [f"line {line}: {name}" for name, line in imports(module) if not may_import(layer, name)]
    assert not wrong, f"{module} may not import {wrong}"


@pytest.mark.parametrize("module", MODULES)
def test_is_short_enough_to_read(module: str) -> None:
    num_lines = MODULES[module].read_text("utf-8").count("\n")
    assert num_lines <= MAX_LINES


@pytest.mark.parametrize("package", [name for name in LIGHT if name in MODULES])
def test_loads_nothing_heavy(package: str) -> None:
    names = [name for name in MODULES if is_under(name, (package,))] if package != "microbatch" else [package]
    program = f"import sys, {', '.join(names)}\nprint(sorted(sys.modules.keys() & {set(LIGHT[package])}))"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("module", "name", "allowed"),
    [
        ("microbatch.core.request", "math", True),
        ("microbatch.core.request", "time", False),
        ("microbatch.core.request", "torch", False),
        ("microbatch.core.request", "microbatch.engine.stream", False),
        ("microbatch.engine.stream", "anyio.abc", True),
        ("microbatch.engine.stream", "microbatch.executor.run", False),
        ("microbatch_kernels.blocks", "microbatch.core", False),
        ("microbatch_kernels.store", "torch.nn", True),
        ("microbatch_kernels.store", "transformers", False),
        ("microbatch.api.app", "microbatch_kernels.manager", False),
        ("microbatch.wiring", "microbatch.executor.run", True),
    ],
)
def test_the_table_itself(module: str, name: str, allowed: bool) -> None:
    assert may_import(layer_of(module), name) is allowed
