"""The sampling defaults of a checkpoint: numbers, or an error that names the file and the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglcore.checkpoint.generation_config import GENERATION, NAMES, read_sampling
from sglcore.core.errors import ConfigError


def given(folder: Path, **values: Any) -> Path:
    (folder / GENERATION).write_text(json.dumps(values))
    return folder


def test_numbers_of_known_names_are_read_and_null_is_none(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) == {}
    wanted = {"temperature": 0.5, "top_k": 20, "top_p": 1, "min_p": 0, "repetition_penalty": 1.1}
    assert read_sampling(given(tmp_path, **wanted, do_sample=True, eos_token_id=[1])) == wanted
    assert set(wanted) == set(NAMES)
    assert read_sampling(given(tmp_path, temperature=None, top_k=7)) == {"top_k": 7}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [True, False, "0.5", [1], {}])
def test_what_is_no_number_is_an_error_by_its_name(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{GENERATION} has {name}: .*wanted a number.*--generation-config none"):
        read_sampling(given(tmp_path, **{name: value}))
