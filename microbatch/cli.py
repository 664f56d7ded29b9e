"""The command ``microbatch``: serve, pull, policies, check. Importing it, and ``--help``, load no torch.

Whatever goes wrong is one line on stderr and a non-zero exit status: 2 for flags and commands that do not exist, 1 for
the rest.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Optional

import typer

from microbatch import __version__
from microbatch.errors import MicrobatchError, SetupError
from microbatch.logs import escape
from microbatch.settings import SETTINGS, Setting
from microbatch.settings_sources import CONFIG_VARIABLE, resolve_settings

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags off where there is no wide terminal
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    try:
        return int(app(args=arguments, prog_name="microbatch", standalone_mode=False) or 0)
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except MicrobatchError as error:
        return _fail(error.message, 1)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)


def _fail(message: str, code: int) -> int:
    print(f"microbatch: error: {escape(' '.join(message.split()))}", file=sys.stderr)
    return code


def _say(text: str) -> None:
    print(f"microbatch: {text}", file=sys.stderr, flush=True)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Serve a language model with dynamic batching."""
    if version:
        print(f"microbatch {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit()


def _serve(config: str | None = None, **flags: Any) -> int:
    """Serve MODEL over an OpenAI-compatible HTTP API.

    Each setting may also come from the environment (MICROBATCH_PORT=9000) or from the section [microbatch] of a
    configuration file; the command line goes before the environment, and that before the file.
    """
    from microbatch.executor.embedded import default_home
    from microbatch.executor.sources import fetch
    from microbatch.logs import configure_logging
    from microbatch.startup import check_files, prefer_passive_waiting, preflight

    prefer_passive_waiting()
    settings = resolve_settings(flags, os.environ, config)
    configure_logging(settings.log_level, as_json=settings.log_json, secrets=settings.api_keys().values())
    source = preflight(settings)
    with _progress(logging.getLogger("microbatch").info) as progress:
        files = fetch(source, default_home(), progress)
    check_files(files, settings)
    from microbatch.server import run_server

    return run_server(settings)


def _parameter(setting: Setting) -> inspect.Parameter:
    """A setting as typer sees it: a text (or texts, or yes and no) that ``resolve_settings`` reads."""
    help = f"{setting.help} Default: {setting.default_text}." if setting.default_text else setting.help
    kind: Any = Optional[bool] if setting.type is bool else Optional[list[str]] if setting.repeatable else Optional[str]
    if setting.positional:
        info: Any = typer.Argument(help=help, metavar=setting.metavar, show_default=False)
    else:
        info = typer.Option(setting.flag, help=help, metavar=setting.metavar or None, show_default=False)
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
    )


def _with_settings(function: Callable[..., int]) -> Callable[..., int]:
    """Give ``function`` the signature that the table of settings says, with ``--config`` as its last option."""
    help = f"INI file with a section [microbatch]; {CONFIG_VARIABLE} names one too."
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[str], typer.Option("--config", help=help, metavar="FILE", show_default=False)],
    )
    parameters = [*map(_parameter, SETTINGS.values()), config]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


app.command("serve")(_with_settings(_serve))


@app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub name. Without it: the embedded model.")] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Compare the embedded model with its sha256 sums.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Download and convert the embedded model again.")] = False,
) -> None:
    """Download MODEL and get it ready, so that serve starts at once and without a network."""
    from microbatch.executor import embedded, hub, sources

    home, source = embedded.default_home(), sources.find_source(model)
    if source.kind != "embedded" and (verify or force):
        raise SetupError("--verify and --force are for the embedded model only")
    with _progress() as progress:
        if source.kind == "embedded" and verify and not force:
            count = embedded.verify_embedded(home, progress)
            _say(f"{count} files are whole")
            folder = embedded.embedded_folder(home)
        elif source.kind == "embedded":
            folder = embedded.ensure_embedded(home, progress, force=force)
            if verify:
                embedded.verify_embedded(home, progress)
        elif source.kind == "hub":
            folder = hub.download_folder(source.name, progress)
        else:
            folder = sources.fetch(source, home).folder
    print(folder)


@app.command()
def policies() -> None:
    """List the batching policies."""
    from microbatch.core.policies import POLICIES

    for name, factory in sorted(POLICIES.items()):
        about = (inspect.getdoc(sys.modules[factory.__module__]) or "").partition("\n")[0]
        parameters = inspect.signature(factory).parameters.values()
        print(about.replace("``", "") or name)
        for parameter in parameters:
            print(f"    --policy-arg {parameter.name}={parameter.default}")


@app.command()
def check() -> int:
    """Show versions, device, model folder, and whether the embedded model is there."""
    from microbatch.diagnosis import examine
    from microbatch.executor.embedded import default_home

    failed = 0
    for finding in examine(default_home()):
        failed += not finding.ok
        print(f"{'  ' if finding.ok else '! '}{finding.name:<18}{finding.value}", flush=True)
    return 1 if failed else 0


def _progress(say: Callable[[str], None] = _say) -> Any:
    from microbatch.progress import shown_progress

    return shown_progress(say)
