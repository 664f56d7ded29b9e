"""Where settings come from: command line > environment > configuration file > default. Standard library only."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from microbatch.errors import SetupError
from microbatch.settings import SETTINGS, Setting, Settings, check_value, read_text, require_known

#: The section of a configuration file that is read; others belong to other programs.
SECTION: Final = "microbatch"
#: The environment's way to say ``--config``.
CONFIG_VARIABLE: Final = "MICROBATCH_CONFIG"

_BOOLEANS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def resolve_settings(
    flags: Mapping[str, str | bool | Sequence[str] | None],
    environment: Mapping[str, str],
    config: str | None = None,
) -> Settings:
    """The settings of one start. ``flags``: what was given on the command line by name (None: not given).

    Reads the configuration file (``config``, else ``MICROBATCH_CONFIG``) and ``@FILE`` texts. ``SetupError`` names the
    flag, variable or file line at fault.
    """
    values = _from_file(config or environment.get(CONFIG_VARIABLE) or None)
    values.update(_from_environment(environment))
    values.update(_from_flags(flags))
    return Settings(**values)


def parse_value(setting: Setting, text: str, label: str) -> Any:
    """A text of the command line, the environment or a file in the setting's own type."""
    if setting.repeatable:
        return check_value(setting, [part.strip() for part in re.split(r"[,\n]", text) if part.strip()], label)
    if setting.type is str:
        return check_value(setting, _expand(text, label) if setting.reads_file else text, label)
    if setting.type is bool:
        return check_value(setting, _BOOLEANS.get(text.strip().lower(), text), label)
    try:
        value = setting.type(text)
    except ValueError:
        hint = " (Kubernetes sets it for a service named microbatch: use enableServiceLinks: false)"
        raise SetupError(
            f"{label} must be {'a whole number' if setting.type is int else 'a number'}, got {text!r}"
            + (hint if text.startswith(("tcp://", "udp://")) else "")
        ) from None
    return check_value(setting, value, label)


def _from_flags(flags: Mapping[str, str | bool | Sequence[str] | None]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, given in flags.items():
        require_known(name, "setting")
        setting = SETTINGS[name]
        label = setting.flag.partition("/")[0]
        if isinstance(given, str) and not setting.repeatable:
            values[name] = parse_value(setting, given, label)
        elif given is not None and given != [] and given != ():
            values[name] = check_value(setting, given, label)
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Only the names of the table: Kubernetes and others put more of this form there. An empty one counts as unset."""
    return {
        name: parse_value(setting, environment[setting.variable], setting.variable)
        for name, setting in SETTINGS.items()
        if environment.get(setting.variable)
    }


def _from_file(path: str | None) -> dict[str, Any]:
    """The section [microbatch] of an INI file: one setting a line, lists by comma or on indented lines."""
    if path is None:
        return {}
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(read_text(path, "--config"), source=path)
    except configparser.Error as error:
        raise SetupError(f"--config: file {path} is not in INI form: {' '.join(str(error).split())}") from None
    if not parser.has_section(SECTION):
        raise SetupError(f"--config: file {path} has no section [{SECTION}]")
    values = {}
    for key, text in parser.items(SECTION):
        name = key.replace("-", "_")
        require_known(name, f"setting in {path}:")
        values[name] = parse_value(SETTINGS[name], text, f"{path}: {key}")
    return values


def _expand(text: str, label: str) -> str:
    """``@FILE`` is the contents of FILE; ``@@`` begins a text that begins with ``@``."""
    if text.startswith("@@"):
        return text[1:]
    return read_text(text[1:], label) if text.startswith("@") else text
