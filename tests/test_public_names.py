"""What ``import microbatch`` promises."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import microbatch
from microbatch import errors

ROOT = Path(__file__).parent.parent


def test_public_names_are_listed_and_sorted() -> None:
    assert microbatch.__all__ == sorted(microbatch.__all__)
    assert set(microbatch.__all__) <= set(dir(microbatch))


@pytest.mark.parametrize("name", microbatch.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(microbatch, name) is not None


@pytest.mark.parametrize("name", sorted(set(microbatch.__all__) - {"__version__"}))
def test_every_public_name_is_the_one_at_its_home_and_documented(name: str) -> None:
    value = getattr(microbatch, name)
    home = importlib.import_module(microbatch._HOMES[name])
    assert value is getattr(home, name)
    assert inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'microbatch' has no attribute 'Server'"):
        microbatch.Server


def test_a_star_import_gives_the_list() -> None:
    names: dict[str, object] = {}
    exec("from microbatch import *", names)
    assert names.keys() - {"__builtins__"} == set(microbatch.__all__)


def test_importing_loads_none_of_it() -> None:
    program = (
        "import sys, microbatch; before = set(sys.modules); microbatch.SamplingParams; microbatch.MicrobatchError\n"
        "print(sorted(name for name in before if name.startswith('microbatch')), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("['microbatch'] False\n", "")


def error_classes() -> list[type[errors.MicrobatchError]]:
    return [getattr(errors, name) for name in errors.__all__]


def test_every_error_is_listed_and_sorted() -> None:
    assert errors.__all__ == sorted(errors.__all__)
    defined = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("error", error_classes())
def test_every_error_is_a_microbatch_error_with_its_answer(error: type[errors.MicrobatchError]) -> None:
    assert issubclass(error, microbatch.MicrobatchError)
    assert 400 <= error.status <= 599
    raised = error("it is wrong", param="prompt")
    assert (str(raised), raised.message, raised.param, raised.code) == ("it is wrong",) * 2 + ("prompt", error.code)


@pytest.mark.parametrize("error", error_classes())
def test_the_tree_in_the_docstring_is_the_tree(error: type[errors.MicrobatchError]) -> None:
    assert errors.__doc__ is not None
    (line,) = [line for line in errors.__doc__.splitlines() if line.lstrip(" +-").split(" ")[0] == error.__name__]
    depth = error.__mro__.index(microbatch.MicrobatchError)
    assert len(line) - len(line.lstrip(" ")) == 4 + 2 * depth
    if error is not errors.SetupError:
        assert f" {error.status} {error.type}" in line
        assert error.code is None or error.code == error.type or f"code {error.code}" in line


def test_an_error_may_carry_a_code_of_its_own() -> None:
    assert errors.NotFoundError("no such job", code="job_not_found").code == "job_not_found"
    assert errors.QueueFullError("full", retry_after=3).retry_after == 3
