"""The configuration: read once, typed, and with the source of each value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sglcore.config.engine_config import EngineConfig, memory_bytes, resolve_config, resolve_server_config
from sglcore.config.server_config import ServerConfig
from sglcore.config.settings import Setting, settings_of
from sglcore.core.errors import ConfigError

CHOSEN = [
    (resolver, item)
    for resolver, record in ((resolve_config, EngineConfig), (resolve_server_config, ServerConfig))
    for item in settings_of(record).values()
    if item.choices
]
"""The function that reads a record, and each setting of the record that has choices."""


def test_arguments_win_over_variables_and_sources_are_kept() -> None:
    config = resolve_config(
        {"max_requests": 3, "dtype": None}, {"SGLCORE_MAX_REQUESTS": "9", "SGLCORE_DTYPE": "float32", "HOME": "/"}
    )
    assert (config.max_requests, config.dtype) == (3, "float32")
    assert dict(config.sources) == {"max_requests": "argument", "dtype": "SGLCORE_DTYPE"}


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("SGLCORE_OVERLAP", "0", "overlap", False),
        ("SGLCORE_EAGER_INPUT_NO_COPY", "true", "eager_input_no_copy", True),
        ("SGLCORE_GRAPH_BUCKETS", "1,4", "graph_buckets", (1, 4)),
        ("SGLCORE_KV_CACHE_MEMORY", "512M", "kv_cache_memory", 512 << 20),
        ("SGLCORE_MODEL", "", "model", None),
        ("SGLCORE_PAGE_SIZE", "32", "page_size", 32),
    ],
)
def test_every_kind_of_variable_is_parsed_and_an_empty_one_is_none(
    variable: str, text: str, name: str, value: object
) -> None:
    assert getattr(resolve_config({}, {variable: text}), name) == value


@pytest.mark.parametrize(
    "given",
    [
        {"overlap": "0"},
        {"max_requests": "8"},
        {"page_size": 2.5},
        {"max_requests": True},
        {"graph_buckets": "1,2"},
        {"max_batch_tokens": 0},
        {"kv_cache_memory": "infG"},
        {"dtype": 16},
    ],
)
def test_a_value_of_another_kind_names_itself(given: dict[str, Any]) -> None:
    name = next(iter(given))
    with pytest.raises(ConfigError, match=name):
        resolve_config(given, {})


@pytest.mark.parametrize(("resolver", "item"), CHOSEN, ids=[item.name for _, item in CHOSEN])
def test_a_setting_with_choices_takes_each_of_them_and_names_them_for_another_word(
    resolver: Any, item: Setting
) -> None:
    for choice in item.choices:
        assert getattr(resolver({item.name: choice}, {}), item.name) == choice
    for given in ({item.name: "ghost"}, {item.name: item.choices[-1].upper()}):
        with pytest.raises(ConfigError, match=f"{item.name} is .*; wanted one of {', '.join(item.choices)}"):
            resolver(given, {})
    with pytest.raises(ConfigError, match=rf"did you mean {item.choices[-1]}\?"):
        resolver({item.name: f"{item.choices[-1]}s"}, {})


@pytest.mark.parametrize(("resolver", "item"), CHOSEN, ids=[item.name for _, item in CHOSEN])
def test_the_help_of_a_setting_explains_each_choice(resolver: Any, item: Setting) -> None:
    words = set(re.findall(r"[\w-]+", item.help))
    assert set(item.choices) <= words, "words of --help"
    default = getattr(resolver({}, {}), item.name)
    assert default is None or default in item.choices


def test_unknown_names_are_errors_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean max_requests"):
        resolve_config({"max_request": 3}, {})
    with pytest.raises(ConfigError, match="SGLCORE_MAX_REQUEST; did you mean SGLCORE_MAX_REQUESTS"):
        resolve_config({}, {"SGLCORE_MAX_REQUEST": "3"})


def test_a_path_is_a_model_and_a_list_is_a_tuple() -> None:
    config = resolve_config({"model": Path("/x"), "graph_buckets": [2, 8]}, {})
    assert (config.model, config.graph_buckets) == ("/x", (2, 8))


SIZES = {
    "1073741824": 1 << 30,
    "4G": 4 << 30,
    "1.5m": 3 << 19,
    "2K": 2048,
    "64MiB": 1 << 26,
    "3 gib": 3 << 30,
    "2Ti": 2 << 40,
}


@pytest.mark.parametrize(("text", "count"), SIZES.items())
def test_sizes(text: str, count: int) -> None:
    assert memory_bytes("x", text) == count


@pytest.mark.parametrize("text", ["", "G", "MiB", "64MB", "1iB", "1GG", "4 Q", "nan", "inf"])
def test_what_is_no_size_or_could_mean_two_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="x is .*; wanted a size such as 512M"):
        memory_bytes("x", text)


def test_it_is_frozen() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().max_requests = 5  # pyright: ignore[reportAttributeAccessIssue]
