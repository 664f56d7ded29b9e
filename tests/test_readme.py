"""The README tells the truth: its commands are known, its requests answered, its programs run, its tables current.

What is read: blocks fenced as ``sh`` (commands: ``scripts/...``, ``microbatch ...``, ``curl ...``, and those in
``HARMLESS``), ``python`` and ``json``; the table between the two ``settings`` comments, which
``python -m tests.readme`` puts there; links to files. A command of another kind fails here until it is taught.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from starlette.routing import Route

import microbatch
from microbatch.engine.client import AsyncEngine
from microbatch.settings import SETTINGS
from tests.readme import (
    README,
    ROOT,
    Block,
    Curl,
    blocks,
    commands,
    commands_of,
    parse_curl,
    title,
    with_settings_table,
)

#: Commands that set a reader up and prove nothing about this project.
HARMLESS = ("cd", "export", "git", "pip")
#: What programs that are started here need to find this checkout, installed or not.
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
#: Runs a program from standard input that may use ``await`` at its top level, as README programs do.
RUNNER = """
import ast, asyncio, inspect, sys
code = compile(sys.stdin.read(), "<README.md>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
result = eval(code, {"__name__": "__main__"})
if inspect.iscoroutine(result):
    asyncio.run(result)
"""


def test_every_command_is_one_that_these_tests_know() -> None:
    known = {"curl", "microbatch", "scripts", *HARMLESS}
    assert [words for words in commands() if words[0].partition("/")[0] not in known] == []


def test_it_shows_how_to_serve_test_and_ask() -> None:
    assert {"scripts/serve", "scripts/test", "curl"} <= {words[0] for words in commands()}


@pytest.mark.parametrize("words", commands_of("scripts"), ids=title)
def test_a_script_exists_and_can_be_run(words: list[str]) -> None:
    assert os.access(ROOT / words[0], os.X_OK)


@pytest.mark.parametrize(
    "words",
    [
        *commands_of("microbatch"),
        *(["microbatch", "serve", *words[1:]] for words in commands_of("scripts") if "serve" in words[0]),
    ],
    ids=title,
)
def test_a_command_line_is_understood(words: list[str]) -> None:
    # Flags are read before help is given, so an unknown one fails; nothing is carried out.
    program = [sys.executable, "-m", "microbatch", *words[1:], "--help"]
    done = subprocess.run(program, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.anyio
@pytest.mark.parametrize("words", commands_of("curl"), ids=title)
async def test_a_request_is_answered(words: list[str]) -> None:
    curl = parse_curl(words)
    parts = urlsplit(curl.url)
    host, port = SETTINGS["host"].default, SETTINGS["port"].default
    assert parts.netloc in (f"{host}:{port}", f"localhost:{port}")
    assert curl.body is None or json.loads(curl.body)
    answer = await ask(curl)
    assert answer.status_code == 200, answer.text
    if "text/event-stream" in answer.headers["content-type"]:
        assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text


async def ask(curl: Curl) -> httpx2.Response:
    """Send a request to the real application over an engine with a fake executor."""
    from microbatch.core.policies import make_policy
    from microbatch.executor.embedded import EMBEDDED_NAME
    from microbatch.executor.fake import FakeExecutor
    from microbatch.text.bytes_tokenizer import ByteTokenizer
    from microbatch.wiring import assemble
    from microbatch_kernels.manager import PagedKVManager

    policy = make_policy("window", {"max_batch_size": 8, "window_ms": 0})
    engine = AsyncEngine(
        lambda: assemble(
            FakeExecutor(),
            PagedKVManager(32, 16),
            policy,
            ByteTokenizer(),
            model_name=EMBEDDED_NAME,
            max_model_len=256,
        )
    )
    async with engine:
        transport = httpx2.ASGITransport(microbatch.create_app(engine))
        async with httpx2.AsyncClient(transport=transport) as client:
            return await client.request(curl.method, curl.url, content=curl.body, headers=curl.headers)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: f"line {block.line}")
def test_a_program_compiles_and_imports_public_names(block: Block) -> None:
    compile(block.text, str(README), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module == "microbatch":
            assert {alias.name for alias in node.names} <= set(microbatch.__all__)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [block for block in blocks("python") if re.search(r"^from microbatch import", block.text, re.MULTILINE)],
    ids=lambda block: f"line {block.line}",
)
def test_a_program_that_needs_no_server_runs(block: Block, embedded_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=block.text, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr


def test_every_answer_that_is_shown_is_json() -> None:
    for block in blocks("json"):
        json.loads(block.text)


def test_every_route_of_the_application_is_listed() -> None:
    app = microbatch.create_app(AsyncEngine(lambda: pytest.fail("nothing is loaded for this"), model_name="any"))
    routes = {route.path.replace(":path", "") for route in app.routes if isinstance(route, Route)}
    listed = re.findall(r"`(?:DELETE|GET|POST|PUT) (/[^`]*)`", README.read_text("utf-8"))
    assert sorted(listed) == sorted(routes)


def test_the_table_of_settings_is_that_of_the_program() -> None:
    text = README.read_text("utf-8")
    assert with_settings_table(text) == text


def test_every_link_to_a_file_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!\w+:|#)([^)#]+)", README.read_text("utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []
