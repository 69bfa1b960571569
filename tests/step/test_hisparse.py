"""Valid `--hisparse` settings, and the errors for all others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglcore.core.errors import ConfigError
from sglcore.step.hisparse_config import HiSparseConfig, parse_hisparse_config


def test_nothing_is_asked_by_nothing_and_by_off() -> None:
    assert parse_hisparse_config(None) is None and parse_hisparse_config("off") is None


def test_the_defaults_are_twice_what_a_token_reads_and_twice_the_pages() -> None:
    for asked in ("on", "{}", " {} "):
        found = parse_hisparse_config(asked)
        assert found is not None and found == HiSparseConfig() and found.host_to_device_ratio == 2
        assert found.buffer_rows(512) == 1024 and not found.unused


def test_a_file_says_the_same_as_its_text(tmp_path: Path) -> None:
    given = {
        "top_k": 8,
        "device_buffer_size": 8,
        "host_to_device_ratio": 3,
        "swap_in_block_size": 1024,
        "algorithm": "x",
    }
    (tmp_path / "hisparse.json").write_text(json.dumps(given))
    for asked in (json.dumps(given), str(tmp_path / "hisparse.json")):
        found = parse_hisparse_config(asked)
        assert found is not None and (found.device_buffer_size, found.host_to_device_ratio) == (8, 3)
        assert dict(found.unused) == {"top_k": 8, "swap_in_block_size": 1024, "algorithm": "x"}
        assert found.buffer_rows(8) == 8


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("{", "is not JSON"),
        ("nowhere.json", "cannot be read"),
        ("[]", r"hisparse is \[\]"),
        ('"on"', 'hisparse is "on"; wanted on, auto, a JSON object'),
        ('{"device_buffer_size": 7, "top_k": 8}', "device_buffer_size of hisparse is 7; wanted at least 8: top_k is 8"),
        ('{"device_buffer_size": 0}', "device_buffer_size of hisparse is 0"),
        ('{"device_buffer_size": true}', "device_buffer_size of hisparse is true"),
        ('{"device_buffer_size": 2.5}', "device_buffer_size of hisparse is 2.5"),
        ('{"top_k": 0}', "top_k of hisparse is 0"),
        ('{"top_k": "8"}', 'top_k of hisparse is "8"'),
        ('{"prompt_buffer_size": -1}', "prompt_buffer_size of hisparse is -1; wanted a whole number of at least 0"),
        ('{"prompt_buffer_size": false}', "prompt_buffer_size of hisparse is false"),
        ('{"swap_in_block_size": 0}', "swap_in_block_size of hisparse is 0; wanted a whole number from 1 to 1024"),
        ('{"swap_in_block_size": 1025}', "swap_in_block_size of hisparse is 1025"),
        ('{"swap_in_block_size": true}', "swap_in_block_size of hisparse is true"),
        ('{"host_to_device_ratio": 0.5}', "host_to_device_ratio of hisparse is 0.5"),
        ('{"host_to_device_ratio": true}', "host_to_device_ratio of hisparse is true"),
        ('{"host_to_device_ratio": NaN}', "host_to_device_ratio of hisparse is NaN"),
        ('{"host_to_device_ratio": Infinity}', "host_to_device_ratio of hisparse is Infinity"),
    ],
)
def test_what_can_not_be_is_named_with_what_was_wanted(asked: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_hisparse_config(asked)


def test_the_room_of_a_prompt_is_as_long_as_is_asked_and_at_most_a_whole_request() -> None:
    for asked, tokens in (("on", 160), ('{"prompt_buffer_size": 0}', 0), ('{"prompt_buffer_size": 48}', 48)):
        found = parse_hisparse_config(asked)
        assert found is not None and found.held_tokens(160) == tokens and found.held_tokens(32) == min(tokens, 32)


def test_fewer_rows_than_a_token_of_the_model_reads_are_refused() -> None:
    found = parse_hisparse_config('{"device_buffer_size": 100}')
    assert found is not None
    with pytest.raises(ConfigError, match="100; wanted at least 101: a token of this model reads 101"):
        found.buffer_rows(101)
