"""The package as others get it: the lists in setup.cfg, a wheel, an editable install, a run from the repository."""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import microbatch

ROOT = Path(__file__).parent.parent
SOURCES = {"microbatch": ROOT / "microbatch", "microbatch_kernels": ROOT / "kernels/microbatch_kernels"}


def read_config() -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg", "utf-8")
    return config


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


CONFIG = read_config()
EXTRAS = {name: lines(value) for name, value in CONFIG["options.extras_require"].items()}
REQUIREMENTS = [
    Requirement(line)
    for line in (*lines(CONFIG["options"]["install_requires"]), *EXTRAS["gpu"], *EXTRAS["test"], *EXTRAS["check"])
]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a Python program and give its output; the test fails with its errors if it does."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "HF_HUB_OFFLINE") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-B", *map(str, command)], cwd=cwd, env={**kept, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs, so that no test leaves anything in the working tree."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("microbatch", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module", params=["build_wheel", "build_editable"])
def installed(request: pytest.FixtureRequest, project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds an unpacked wheel, or an editable one, built by the build backend."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    program = f"import setuptools.build_meta as b, sys; b.{request.param}(sys.argv[1])"
    run("-c", program, wheels, cwd=project)
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def package_folders() -> Iterator[str]:
    for package, folder in SOURCES.items():
        for path in folder.rglob("__init__.py"):
            yield ".".join((package, *path.parent.relative_to(folder).parts))


def data_files(package: str) -> set[str]:
    folder = SOURCES[package]
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"{package}/{path.relative_to(folder)}" for path in files}


def test_the_list_of_packages_is_that_of_the_folders() -> None:
    assert lines(CONFIG["options"]["packages"]) == sorted(package_folders())


def test_every_folder_with_modules_is_a_package() -> None:
    for folder in (*SOURCES.values(), ROOT / "tests"):
        for path in folder.rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def test_kernels_is_a_folder_and_not_a_package() -> None:
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not any(
        (ROOT / folder / name).exists() for folder in ("tests", "bench") for name in ("kernels", "kernels.py")
    )


def test_the_repository_root_does_not_hide_the_kernels_package_of_others() -> None:
    program = "import transformers.integrations.hub_kernels, transformers.utils as u; print(u.is_kernels_available())"
    assert run("-c", program, cwd=ROOT, PYTHONPATH=str(ROOT)) == str(has_hub_kernels())


def has_hub_kernels() -> bool:
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_the_repository_root_works_uninstalled() -> None:
    program = "import microbatch, microbatch_kernels.manager as m; print(microbatch.__file__); print(m.__file__)"
    found = run("-S", "-c", program, cwd=ROOT, PYTHONPATH=f"{ROOT}:{ROOT / 'kernels'}").splitlines()
    assert [Path(name) for name in found] == [
        ROOT / "microbatch/__init__.py",
        ROOT / "kernels/microbatch_kernels/manager.py",
    ]


def test_wheel_and_editable_install_can_be_imported(installed: Path, tmp_path: Path) -> None:
    # -S leaves out this environment's own packages; addsitedir also carries out what an editable install registers.
    program = (
        "import site, sys; site.addsitedir(sys.argv[1])\n"
        "import microbatch, microbatch.core.scheduler, microbatch_kernels.manager\n"
        "print(microbatch.__version__, microbatch.SamplingParams(max_tokens=3).max_tokens)"
    )
    assert run("-I", "-S", "-c", program, installed, cwd=tmp_path) == f"{microbatch.__version__} 3"


@pytest.mark.parametrize("installed", ["build_wheel"], indirect=True)
def test_wheel_holds_every_file_and_no_folder_more(installed: Path) -> None:
    metadata = f"microbatch-{microbatch.__version__}.dist-info"
    assert {path.name for path in installed.iterdir()} == {"microbatch", "microbatch_kernels", metadata}
    packed = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert data_files("microbatch") | data_files("microbatch_kernels") == {
        name for name in packed if not name.startswith(metadata)
    }
    assert {"microbatch/py.typed", "microbatch_kernels/py.typed", f"{metadata}/licenses/LICENSE"} <= packed


@pytest.mark.parametrize("installed", ["build_wheel"], indirect=True)
def test_wheel_metadata(installed: Path) -> None:
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    assert found.metadata["Name"] == "microbatch"
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert found.metadata["Requires-Python"] == ">=3.11"
    assert [(point.name, point.value) for point in found.entry_points] == [("microbatch", "microbatch.cli:main")]


def pins() -> dict[str, list[Requirement]]:
    """The lines of constraints.txt by package: one, or one for each range of Python versions."""
    found: dict[str, list[Requirement]] = {}
    for line in lines((ROOT / "constraints.txt").read_text("utf-8")):
        if not line.startswith("#"):
            requirement = Requirement(line)
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_every_requirement_has_a_lower_bound_and_a_pin_that_fits_it(requirement: Requirement) -> None:
    assert [part.operator for part in requirement.specifier] == [">="]
    for pin in pins()[canonicalize_name(requirement.name)]:
        (exact,) = pin.specifier
        assert exact.operator == "==" and "+" not in exact.version
        assert requirement.specifier.contains(exact.version)


def test_the_tests_run_with_the_pinned_versions() -> None:
    wrong = []
    for name, candidates in pins().items():
        for pin in candidates:
            if pin.marker is None or pin.marker.evaluate():
                try:
                    found = Version(importlib.metadata.version(name))
                except importlib.metadata.PackageNotFoundError:
                    continue  # needed on another platform only
                if not pin.specifier.contains(found.public):
                    wrong.append(f"{pin} but {found} is installed")
    assert not wrong


def test_extras_name_only_each_other() -> None:
    assert EXTRAS["dev"] == [f"microbatch[{','.join(name for name in EXTRAS if name != 'dev')}]"]


def test_pyproject_holds_the_build_system_and_nothing_else() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert re.findall(r"^\[.*\]$", text, re.MULTILINE) == ["[build-system]"]
    assert len(text.splitlines()) == 3
