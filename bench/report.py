"""What every benchmark shares: the machine, the versions, medians, and the JSON they are kept in."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "starlette", "uvicorn", "anyio", "msgspec")


def machine() -> dict[str, Any]:
    """CPU, cores, memory; the load of the last minute, since a busy machine makes every figure doubtful."""
    info: dict[str, Any] = {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.system()}
    info["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    info["load_at_start"] = round(os.getloadavg()[0], 2)
    return info


def versions() -> dict[str, str]:
    """Python and the packages that matter."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def write(name: str, question: str, results: Mapping[str, Any]) -> Path:
    """Keep a result as ``bench/results/NAME.json`` with what it takes to repeat it; prints the path."""
    report = {
        "question": question,
        "command": " ".join(["python", "-m", f"bench.{name}", *(Path(a).name for a in sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "results": results,
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"kept in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path


def median(values: Iterable[float], digits: int = 4) -> float:
    """The median, rounded to what the reader can use."""
    return round(statistics.median(values), digits)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
