"""The header parser of safetensors files agrees with the loader of their tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import _SIZE, _TYPES, save_file

from sglcore.checkpoint.checkpoint_files import INDEX, checkpoint_files, read_json, read_list, weight_names
from sglcore.checkpoint.gguf_header import read_header
from sglcore.checkpoint.model_config import read_config
from sglcore.checkpoint.safetensors_header import ELEMENT_BYTES, PLAIN_BYTES, read_entries
from sglcore.core.errors import CheckpointError, ConfigError, SglcoreError
from sglcore.models.weights.safetensors_file import DTYPES, READABLE


def test_every_type_that_is_read_has_its_size() -> None:
    assert {name: dtype.itemsize for name, dtype in READABLE.items()} == {
        name: ELEMENT_BYTES[name] for name in READABLE
    }
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == PLAIN_BYTES


def test_every_type_that_is_checked_has_the_librarys_size() -> None:
    sizes = {name: _SIZE[dtype] for name, dtype in (*_TYPES.items(), ("F8_E8M0", torch.float8_e8m0fnu))}
    assert ELEMENT_BYTES.items() <= sizes.items()


def written(folder: Path, data: int, **tensors: tuple[str, list[int], int, int]) -> Path:
    """Write a file with `data` bytes of data and tensors given as (dtype, shape, start, end)."""
    parts = {
        name: {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        for name, (kind, shape, start, end) in tensors.items()
    }
    header = json.dumps(parts).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data))
    return file


def test_tensors_come_in_the_order_of_their_bytes_and_reach_the_files_end(tmp_path: Path) -> None:
    file = written(tmp_path, 12, b=("F16", [2], 8, 12), a=("F32", [1, 2], 0, 8), none=("F32", [0], 12, 12))
    entries = read_entries(file)
    assert [(each.name, each.num_bytes) for each in entries] == [("a", 8), ("b", 4), ("none", 0)]
    assert entries[1].end == file.stat().st_size


def test_tensors_that_share_bytes_are_damage_and_empty_ones_are_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is damaged: 'a' and 'b' have bytes in common"):
        read_entries(written(tmp_path, 8, b=("F32", [1], 3, 7), a=("F32", [1], 0, 4)))
    file = written(tmp_path, 8, a=("F32", [1], 0, 4), none=("F32", [0], 4, 4), b=("F32", [1], 4, 8))
    assert [each.name for each in read_entries(file)] == ["a", "none", "b"]
    file = written(tmp_path, 8, b=("F32", [1], 4, 8), a=("F32", [1], 0, 4), none=("F32", [0], 4, 4))
    assert [each.name for each in read_entries(file)] == ["a", "none", "b"]


def test_entries_are_those_of_the_library(tmp_path: Path) -> None:
    given = {name: torch.zeros(2, 3).to(dtype) for name, dtype in _TYPES.items() if not name.startswith("C")}
    save_file(given, tmp_path / "model.safetensors", {"format": "pt"})
    found = {each.name: each for each in read_entries(tmp_path / "model.safetensors")}
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {name: (name, (2, 3)) for name in given}
    assert {name: each.num_bytes for name, each in found.items()} == {name: each.nbytes for name, each in given.items()}


@pytest.mark.parametrize("size", range(8))
def test_a_file_shorter_than_its_length_is_damage(size: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=f"is damaged: it has {size} bytes, and its header alone would need 8"):
        read_entries(tmp_path / "model.safetensors")


@pytest.mark.parametrize("over", [1, 8, 16, 17, 2**62])
def test_a_header_may_reach_the_files_end_and_no_further(over: int, tmp_path: Path) -> None:
    header, file = b'{"__metadata__": {"format": "pt"}}', tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert read_entries(file) == ()
    file.write_bytes((len(header) + over).to_bytes(8, "little") + header)
    found = f"it has {len(header) + 8} bytes, and its header alone would need {len(header) + 8 + over}"
    with pytest.raises(CheckpointError, match=f"is damaged: {found}"):
        read_entries(file)


def test_weight_files_are_those_of_the_index_in_order_and_each_is_there(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor .* \(other weight files: pytorch_mo"):
        checkpoint_files(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert checkpoint_files(tmp_path) == (tmp_path / "model.safetensors",)
    names = {"c": "2.safetensors", "a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    assert weight_names(tmp_path) == ("1.safetensors", "2.safetensors")
    (tmp_path / "2.safetensors").touch()
    with pytest.raises(CheckpointError, match=rf"lacks 1.safetensors; wanted the 2 files of {INDEX}"):
        checkpoint_files(tmp_path)
    (tmp_path / "1.safetensors").touch()
    assert checkpoint_files(tmp_path) == (tmp_path / "1.safetensors", tmp_path / "2.safetensors")


GOOD = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}
WRONG = (None, True, "x", 2.0, -1, [], [1], [1.0, 2], ["a", "b"], [-1, -2], [0.0, 8.0], [True, 2], {}, {"a": 1})


@pytest.mark.parametrize("name", [*GOOD, ""])
def test_a_header_of_other_values_is_damage_in_one_line(tmp_path: Path, name: str) -> None:
    for value in WRONG:
        header = json.dumps({"a": {**GOOD, name: value} if name else value}).encode()
        file = tmp_path / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        if name == "dtype" and value == "x":  # a dtype of unknown width
            assert read_entries(file)[0].dtype == "x"
            continue
        with pytest.raises(CheckpointError, match="is damaged") as error:
            read_entries(file)
        assert "\n" not in str(error.value)


def test_lists_in_lists_without_end_are_damage(tmp_path: Path) -> None:
    header = b"[" * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="its header is not a safetensors header"):
        read_entries(tmp_path / "model.safetensors")
    for reader in (read_json, read_list):
        (tmp_path / "config.json").write_bytes(header)
        with pytest.raises(ConfigError, match="cannot be read"):
            reader(tmp_path / "config.json")
    (tmp_path / INDEX).write_bytes(header)
    with pytest.raises(CheckpointError, match="is damaged; wanted JSON with a weight_map"):
        weight_names(tmp_path)


@pytest.mark.parametrize(
    ("data", "tensor", "found"),
    [
        (7, ("F32", [1, 2], 0, 8), "'a' ends at "),
        (12, ("F32", [1, 2], 5, 13), "'a' ends at "),
        (8, ("F32", [1, 2], -8, 0), r"'a' of shape \[1, 2\] and type F32 has 8 bytes"),
        (8, ("F32", [1, 2], -1, 7), r"'a' of shape \[1, 2\] and type F32 has 8 bytes"),
        (8, ("F16", [1, 2], 0, 8), r"'a' of shape \[1, 2\] and type F16 has 8 bytes"),
    ],
)
def test_a_tensor_that_is_not_where_it_says_is_damage(tmp_path: Path, data: int, tensor: Any, found: str) -> None:
    with pytest.raises(CheckpointError, match=f"is damaged: .*{found}"):
        read_entries(written(tmp_path, data, a=tensor))


@pytest.mark.parametrize(
    "read",
    [read_json, read_list, lambda file: weight_names(file.parent), read_entries, read_header],
    ids=["an object", "a list", "an index", "weights", "a GGUF file"],
)
def test_a_file_that_may_not_be_opened_is_an_error_of_one_line(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a file of another user or a disk error, with every reader."""
    file = tmp_path / INDEX
    file.write_text("{}")

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(SglcoreError, match="cannot be read|is damaged") as error:
        read(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"weight_map": null}',
        '{"weight_map": ["a"]}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": 1, "b": "c"}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": null}}',
    ],
)
def test_an_index_of_something_else_is_damage_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    for reader in (weight_names, checkpoint_files):
        with pytest.raises(CheckpointError, match="is damaged; wanted JSON with a weight_map; download it") as error:
            reader(tmp_path)
        assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no other.json in {tmp_path}; look elsewhere"):
        read_json(tmp_path / "other.json", "look elsewhere")
    with pytest.raises(ConfigError, match="there is no config.json in .*; .* point at the one with config.json"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="list.json cannot be read: .*; wanted JSON; download it again"):
        read_list(tmp_path / "list.json")
