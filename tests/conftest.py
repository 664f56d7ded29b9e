"""What all tests share: no network, no hub, a loop that must not block, properties that repeat."""

from __future__ import annotations

import io
import ipaddress
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Read by libraries when they are first imported, so set before any test module brings them in. Spinning OpenMP threads
# are the largest cost of all where tests share the machine.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without a GPU, Triton kernels run in its interpreter. With one they must not: the tests marked gpu are for them.
if not os.path.exists("/proc/driver/nvidia/version") and shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
from blockbuster import blockbuster_ctx  # noqa: E402

if TYPE_CHECKING:
    import ctypes

# The same examples in every run; `pytest --hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile("ci")


class NetworkBlocked(RuntimeError):
    """A test tried to reach another machine."""


def is_local(family: int, address: Any) -> bool:
    """Whether a socket address is on this machine: a Unix socket, a loopback address or its name."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return True
    host = address[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return bool(host == "localhost")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse every connection but to loopback; fail the test that tried, even if the code under test hid the error."""
    blocked: list[str] = []

    def guard(connect: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(self: socket.socket, address: Any) -> Any:
            if not is_local(self.family, address):
                blocked.append(repr(address))
                raise NetworkBlocked(f"a test may not connect to {address!r}")
            return connect(self, address)

        return guarded

    monkeypatch.setattr(socket.socket, "connect", guard(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guard(socket.socket.connect_ex))
    yield
    assert not blocked, f"the test tried to reach {', '.join(blocked)}"


@pytest.fixture(autouse=True)
def no_blocking(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which microbatch blocks the event loop: file and socket I/O, sleeps, locks."""
    if "anyio_backend" not in request.fixturenames:
        yield
        return
    with blockbuster_ctx("microbatch") as guard:
        for function in guard.functions.values():  # it reads /proc, which is memory and never waits
            function.can_block_in("prometheus_client/process_collector.py", "collect")
        yield


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built library; a machine without a compiler skips, CI must have one."""
    from microbatch_kernels.cpu_library import CompileError, cpu_library

    folder = tmp_path_factory.mktemp("kernels")
    try:
        cpu_library(folder)
    except CompileError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="session")
def library(kernel_folder: Path) -> ctypes.CDLL:
    """The built library."""
    from microbatch_kernels.cpu_library import cpu_library

    return cpu_library(kernel_folder)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Where ``configure_logging`` may write; the loggers are as before afterwards."""
    root, names = logging.getLogger(), ("microbatch", "uvicorn")
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # `force` would close those of pytest
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in names:
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.captureWarnings(False)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The backend of ``@pytest.mark.anyio`` tests. Debug mode also reports coroutines that were never awaited."""
    return "asyncio", {"debug": True}


@pytest.fixture(scope="session")
def home() -> Path:
    """The folder of models, as the program finds it: ``MICROBATCH_HOME`` or the default."""
    from microbatch.executor.embedded import default_home

    return default_home()


@pytest.fixture(scope="session")
def embedded_model(home: Path) -> Path:
    """The embedded model's folder, which ``microbatch pull`` brings; no test fetches it. Marks a test ``model``."""
    from microbatch.executor.embedded import embedded_folder

    folder = embedded_folder(home)
    if not folder.exists():
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say(f"the embedded model is not in {folder.parent}: run `microbatch pull`")
    return folder


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of models for one test, also for the programs it starts."""
    folder = tmp_path / "home"
    monkeypatch.setenv("MICROBATCH_HOME", str(folder))
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "embedded_model" in getattr(item, "fixturenames", ()):
            item.add_marker("model")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
