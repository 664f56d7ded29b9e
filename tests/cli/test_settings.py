"""The table of settings, and where the values come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from microbatch.errors import SetupError
from microbatch.settings import SETTINGS, Setting, Settings, make_settings
from microbatch.settings_sources import resolve_settings


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(**flags: Any) -> str:
    with pytest.raises(SetupError) as caught:
        resolve_settings(flags, {})
    assert "\n" not in caught.value.message
    return caught.value.message


def test_defaults_are_those_of_the_design() -> None:
    settings = Settings()
    assert (settings.host, settings.port, settings.policy) == ("127.0.0.1", 8000, "window")
    assert (settings.max_batch_size, settings.window_ms, settings.max_queue) == (8, 50.0, 256)
    assert (settings.block_size, settings.prefix_cache, settings.drain_timeout_s) == (16, True, 30.0)
    assert settings.model == "" and settings.kv_blocks is None and settings.queue_timeout_s is None


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_row_is_complete(setting: Setting) -> None:
    assert setting.help.endswith(".") and len(setting.help) <= 110
    assert setting.type in (bool, int, float, str)
    assert bool(setting.metavar) is (setting.type is not bool)
    assert setting.default in setting.choices if setting.choices else True


def test_a_row_knows_its_flag_variable_and_default() -> None:
    assert SETTINGS["max_queue"].flag == "--max-queue"
    assert SETTINGS["prefix_cache"].flag == "--prefix-cache/--no-prefix-cache"
    assert SETTINGS["model"].flag == "MODEL"
    assert SETTINGS["window_ms"].variable == "MICROBATCH_WINDOW_MS"
    texts = [SETTINGS[name].default_text for name in ("window_ms", "prefix_cache", "log_json", "kv_blocks", "port")]
    assert texts == ["50", "on", "off", "", "8000"]


def test_command_line_before_environment_before_file_before_default(tmp_path: Path) -> None:
    config = write(tmp_path / "c.ini", "[microbatch]\nport = 1\nmax-queue = 1\nmax_batch_size = 1\n")
    environment = {"MICROBATCH_PORT": "2", "MICROBATCH_MAX_QUEUE": "2"}
    settings = resolve_settings({"port": "3"}, environment, config)
    assert (settings.port, settings.max_queue, settings.max_batch_size, settings.block_size) == (3, 2, 1, 16)


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    config = write(tmp_path / "c.ini", "[other]\nx = 1\n[microbatch]\nlog_json = yes\n")
    assert resolve_settings({}, {"MICROBATCH_CONFIG": config}).log_json is True


def test_a_list_comes_from_each_source(tmp_path: Path) -> None:
    config = write(tmp_path / "c.ini", "[microbatch]\napi_key =\n    one\n    two\n")
    assert resolve_settings({}, {}, config).api_key == ("one", "two")
    assert resolve_settings({}, {"MICROBATCH_API_KEY": "a, b"}, config).api_key == ("a", "b")
    assert resolve_settings({"api_key": ["x,y", "z"]}, {}, config).api_key == ("x,y", "z")


def test_an_empty_variable_and_foreign_ones_count_as_unset() -> None:
    environment = {"MICROBATCH_PORT": "", "MICROBATCH_SERVICE_HOST": "10.0.0.1", "MICROBATCH_HOME": "/x"}
    assert resolve_settings({}, environment) == Settings()


def test_percent_signs_in_a_file_are_just_text(tmp_path: Path) -> None:
    config = write(tmp_path / "c.ini", "[microbatch]\nsystem_prompt = 100% sure %(here)s\n")
    assert resolve_settings({}, {}, config).system_prompt == "100% sure %(here)s"


@pytest.mark.parametrize("text", ["1", "true", "Yes", "ON"])
def test_words_for_true(text: str) -> None:
    assert resolve_settings({}, {"MICROBATCH_LOG_JSON": text}).log_json is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off"])
def test_words_for_false(text: str) -> None:
    assert resolve_settings({}, {"MICROBATCH_PREFIX_CACHE": text}).prefix_cache is False


def test_a_text_may_stand_in_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "prompt.txt", "\ufeffYou are\nterse.\n")
    assert resolve_settings({"system_prompt": f"@{path}"}, {}).system_prompt == "You are\nterse.\n"
    assert resolve_settings({"system_prompt": "@@home"}, {}).system_prompt == "@home"
    assert Settings(system_prompt="@home").system_prompt == "@home"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "x"}, "--port must be a whole number, got 'x'"),
        ({"port": "99999"}, "--port must be from 0 to 65535, got 99999"),
        ({"max_queue": "0"}, "--max-queue must be at least 1, got 0"),
        ({"window_ms": "nan"}, "--window-ms must be from 0 to 60000, got nan"),
        ({"window_ms": "-1"}, "--window-ms must be from 0 to 60000, got -1.0"),
        ({"drain_timeout_s": "inf"}, "--drain-timeout-s must be at least 0, got inf"),
        ({"dtype": "int9"}, "--dtype must be one of auto, float32, float16, bfloat16, got 'int9'"),
        ({"policy_arg": ["x"]}, "policy_arg must be NAME=VALUE, got 'x'"),
        ({"policy_arg": ["=1"]}, "policy_arg must be NAME=VALUE, got '=1'"),
        ({"served_model_name": [""]}, "--served-model-name must be a text or several, none of them empty"),
        ({"prot": "1"}, "unknown setting 'prot'; did you mean 'port'?"),
        ({"system_prompt": "@/no/file"}, "--system-prompt: cannot read file /no/file: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(flags: dict[str, Any], message: str) -> None:
    assert refusal(**flags) == message


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(SetupError, match=r"MICROBATCH_LOG_JSON must be true or false, got 'maybe'"):
        resolve_settings({}, {"MICROBATCH_LOG_JSON": "maybe"})


def test_the_variable_that_kubernetes_sets_is_explained() -> None:
    with pytest.raises(SetupError, match="enableServiceLinks"):
        resolve_settings({}, {"MICROBATCH_PORT": "tcp://10.0.0.1:8000"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[microbatch]\nprot = 1\n", "unknown setting in .*c.ini: 'prot'; did you mean 'port'"),
        ("[microbatch]\nport = x\n", "c.ini: port must be a whole number"),
        ("[server]\nport = 1\n", r"has no section \[microbatch\]"),
        ("port = 1\n", "not in INI form"),
        ("[microbatch]\nport = 1\nport = 2\n", "not in INI form"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SetupError, match=message) as caught:
        resolve_settings({}, {}, write(tmp_path / "c.ini", text))
    assert "\n" not in caught.value.message


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.ini").write_bytes(b"\xff\xfe\x00[")
    with pytest.raises(SetupError, match="is not UTF-8 text"):
        resolve_settings({}, {}, str(tmp_path / "c.ini"))


def test_keyword_arguments_are_checked_by_the_same_table() -> None:
    assert make_settings({"port": 1, "window_ms": 5, "api_key": "k"}).api_key == ("k",)
    assert type(make_settings({"window_ms": 5}).window_ms) is float
    for wrong in ({"port": "1"}, {"port": True}, {"port": None}, {"api_key": [1]}, {"prefix_cache": 1}):
        with pytest.raises(SetupError):
            make_settings(wrong)
    with pytest.raises(SetupError, match="did you mean 'policy'"):
        make_settings({"polcy": "x"})


def test_policy_arguments_are_numbers_where_they_look_like_ones() -> None:
    settings = Settings(policy_arg=("a=1", "b=0.5", "c=x=y"))
    assert settings.policy_arguments() == {"a": 1, "b": 0.5, "c": "x=y"}


def test_keys_come_from_flags_and_a_file_each_once(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "# team\none\n\n  two  \n")
    keys = Settings(api_key=("zero", "one"), api_key_file=path).api_keys()
    assert keys == {"key-0": "zero", "key-1": "one", "key-2": "two"}


def test_a_key_file_may_name_its_clients(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "alice: sk-1\nsk:2\nbob:   sk-3\n")
    assert Settings(api_key_file=path).api_keys() == {"alice": "sk-1", "key-1": "sk:2", "bob": "sk-3"}


@pytest.mark.parametrize("text", ["alice: one\nalice: two\n", "alice: two words\n", "alice:  \n"])
def test_a_wrong_line_of_a_key_file_is_told_without_the_key(tmp_path: Path, text: str) -> None:
    with pytest.raises(SetupError) as raised:
        Settings(api_key_file=write(tmp_path / "keys", text)).api_keys()
    assert "two" not in str(raised.value) and "one" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "two words\n", "bell\x07\n"])
def test_a_key_file_without_a_usable_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SetupError):
        Settings(api_key_file=write(tmp_path / "keys", text)).api_keys()


def test_keys_never_show_in_a_repr() -> None:
    assert "sk-secret" not in repr(Settings(api_key=("sk-secret",)))
