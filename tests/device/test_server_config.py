"""The server's configuration: read as the engine's and together with it, and its secrets are never
shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglcore.config.engine_config import resolve_config, resolve_server_config
from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError

SECRET = "sk-do-not-tell"


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("SGLCORE_PORT", "0", "port", 0),
        ("SGLCORE_DRAIN_TIMEOUT", "1.5", "drain_timeout", 1.5),
        ("SGLCORE_SERVED_MODEL_NAME", "a, b", "served_model_name", ("a", "b")),
        ("SGLCORE_API_KEY", SECRET, "api_key", (SECRET,)),
        ("SGLCORE_RESTART", "1", "restart", True),
        ("SGLCORE_HOST", "", "host", "127.0.0.1"),
    ],
)
def test_every_kind_of_variable_is_parsed(variable: str, text: str, name: str, value: object) -> None:
    assert getattr(resolve_server_config({}, {variable: text}), name) == value


def test_arguments_win_lists_are_tuples_and_whole_seconds_are_numbers() -> None:
    config = resolve_server_config(
        {"port": 1, "cors_origins": ["http://a"], "keep_alive": 5}, {"SGLCORE_PORT": "2", "SGLCORE_REPLICAS": "3"}
    )
    assert (config.port, config.cors_origins, config.keep_alive, config.replicas) == (1, ("http://a",), 5.0, 3)
    assert dict(config.sources) == {
        "port": "argument",
        "cors_origins": "argument",
        "keep_alive": "argument",
        "replicas": "SGLCORE_REPLICAS",
    }


def test_each_record_knows_the_variables_of_the_other() -> None:
    environ = {"SGLCORE_PORT": "9", "SGLCORE_DTYPE": "float32"}
    assert resolve_server_config({}, environ).port == 9
    assert resolve_config({}, environ).dtype == "float32"


@pytest.mark.parametrize("resolve", [resolve_config, resolve_server_config])
def test_a_variable_of_neither_record_is_an_error_for_both(resolve: Any) -> None:
    with pytest.raises(ConfigError, match="SGLCORE_PROT; did you mean SGLCORE_PORT"):
        resolve({}, {"SGLCORE_PROT": "9"})


def test_an_argument_of_the_other_record_is_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown setting dtype"):
        resolve_server_config({"dtype": "float32"}, {})


@pytest.mark.parametrize(
    "given",
    [
        {"port": 65536},
        {"port": "8000"},
        {"drain_timeout": -1.0},
        {"header_timeout": 0.0},
        {"body_timeout": float("inf")},
        {"keep_alive": True},
        {"max_request_bytes": 0},
        {"served_model_name": "one"},
        {"cors_origins": (1,)},
        {"log_level": "loud"},
        {"api_key_file": "/nowhere/keys"},
    ],
)
def test_a_value_that_can_not_be_names_itself(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        resolve_server_config(given, {})


@pytest.mark.parametrize(
    "environ", [{"SGLCORE_BODY_TIMEOUT": "nan"}, {"SGLCORE_PORT": "x"}, {"SGLCORE_RESTART": "yes"}]
)
def test_a_variable_that_can_not_be_names_itself(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(environ))):
        resolve_server_config({}, environ)


def test_keys_of_a_file_stand_behind_the_others(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# for the office\none\n\n  two  \n")
    config = resolve_server_config({"api_key": (SECRET,), "api_key_file": path}, {})
    assert config.api_key == (SECRET, "one", "two")


def test_a_file_without_keys_is_not_an_open_door(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="has no key"):
        resolve_server_config({"api_key_file": str(path)}, {})


def test_keys_are_in_no_text_of_the_configuration_and_in_no_error(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"fine\n{SECRET} and more\n")
    told = [repr(ServerConfig(api_key=(SECRET,))), str(resolve_server_config({"api_key": (SECRET,)}, {}).sources)]
    for given in ({"api_key": SECRET}, {"api_key": (SECRET + "\n",)}, {"api_key_file": str(path)}):
        with pytest.raises(ConfigError) as caught:
            resolve_server_config(given, {})
        told.append(str(caught.value))
    assert "line 2" in told[-1]
    assert not [text for text in told if SECRET in text]


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.1.2.3", True), ("0.0.0.0", False)],
)
def test_it_knows_whether_only_this_machine_reaches_it(host: str, is_loopback: bool) -> None:
    assert ServerConfig(host=host).is_loopback is is_loopback


def test_whole_seconds_are_a_number_like_any_other() -> None:
    assert type(resolve_server_config({"drain_timeout": 2}, {}).drain_timeout) is float
