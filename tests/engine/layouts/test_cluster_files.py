"""A cluster's file: each number in its unit, which values are allowed, and what is said of a part
that is missing or is something else."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.layouts.cluster import Cluster, DeviceNumbers, read_cluster
from sglcore.engine.layouts.link_costs import Links

WHOLE: dict[str, dict[str, Any]] = {
    "device": {"memory_gb": 80, "bandwidth_gb_s": 3350, "tflops": 989, "tflops_8bit": 1979, "launch_us": 2},
    "hosts": {"count": 2, "devices": 8},
    "inside": {"alpha_us": 3, "gb_s": 450},
    "between": {"alpha_us": 10, "gb_s": 50},
    "experts": {"copies": "rank", "bytes_out": 1, "imbalance": 1.3},
}
DEFAULTS = {"tflops_8bit": 989e12, "launch_us": 0.0, "copies": False, "bytes_out": None, "imbalance": 1.0}
"""Values that a file may leave out, and what then holds: 8 bits are as fast as 16."""
TIMES = {"launch_us", "alpha_us"}


def written(tables: dict[str, Any], folder: Path) -> Path:
    """A file with these tables; a value that is no table stands before them."""
    words = {True: "true", False: "false"}

    def text(value: Any) -> str:
        return words[value] if isinstance(value, bool) else repr(value)

    lines = [f"{name} = {text(value)}" for name, value in tables.items() if not isinstance(value, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{key} = {text(value)}" for key, value in table.items())]
    (folder / "c.toml").write_text("\n".join(lines))
    return folder / "c.toml"


def changed(table: str, name: str, value: Any) -> dict[str, Any]:
    return {**WHOLE, table: {**WHOLE[table], name: value}}


def numbers(found: Cluster) -> dict[str, Any]:
    """The values of `DEFAULTS` in a cluster."""
    device = found.device
    values = (device.flops_8bit, device.launch, found.is_copy_per_rank, found.bytes_out, found.imbalance)
    return dict(zip(DEFAULTS, values, strict=True))


def test_every_number_is_read_in_its_unit(tmp_path: Path) -> None:
    found = read_cluster(written(WHOLE, tmp_path))
    links = found.links
    assert found.device == DeviceNumbers(80e9, 3350e9, 989e12, 1979e12, 2e-6)
    assert found == Cluster(found.device, Links(links.inside, links.between, 8), 2, True, 1, 1.3)
    assert (links.inside.alpha, links.between.alpha) == pytest.approx((3e-6, 10e-6), rel=1e-9)
    assert (1 / links.inside.beta, 1 / links.between.beta) == pytest.approx((450e9, 50e9)) and found.devices == 16
    fraction = read_cluster(written(changed("device", "memory_gb", 0.5), tmp_path))
    assert fraction.device.memory == 5e8


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, values in WHOLE.items() for name in values])
def test_a_value_may_be_left_out_only_where_it_has_a_default(table: str, name: str, tmp_path: Path) -> None:
    values = {key: value for key, value in WHOLE[table].items() if key != name}
    file = written({**WHOLE, table: values}, tmp_path)
    if name not in DEFAULTS:
        with pytest.raises(ConfigError, match=rf"\[{table}\] has no {name}; wanted a number above zero"):
            read_cluster(file)
        return
    found = numbers(read_cluster(file))
    assert found == {**numbers(read_cluster(written(WHOLE, tmp_path))), name: DEFAULTS[name]}


@pytest.mark.parametrize("name", ["device", "hosts", "inside", "between"])
def test_a_table_that_is_needed_is_named_with_what_is_in_it(name: str, tmp_path: Path) -> None:
    rest = {table: values for table, values in WHOLE.items() if table != name}
    needed = ", ".join(each for each in WHOLE[name] if each not in DEFAULTS)
    with pytest.raises(ConfigError, match=rf"c.toml has no \[{name}\]; wanted a table with {needed}$"):
        read_cluster(written(rest, tmp_path))


def test_one_host_needs_no_links_to_others_and_no_file_needs_experts(tmp_path: Path) -> None:
    one = {**WHOLE, "hosts": {"count": 1, "devices": 8}}
    found = read_cluster(written(one, tmp_path))
    assert found.links.between.alpha == pytest.approx(1e-5), "what is given is read"
    few = read_cluster(written({name: one[name] for name in ("device", "hosts", "inside")}, tmp_path))
    assert few.links.between == few.links.inside == found.links.inside
    assert (few.is_copy_per_rank, few.bytes_out, few.imbalance) == (False, None, 1.0)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [3, "x", [1]], ids=str)
def test_what_is_no_table_is_refused_by_its_name(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"c.toml has no \[{name}\]; wanted a table"):
        read_cluster(written({**WHOLE, name: value}, tmp_path))


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table, values in WHOLE.items() for name in values if name != "copies"]
)
def test_numbers_are_above_zero_and_only_times_may_be_zero(table: str, name: str, tmp_path: Path) -> None:
    is_count = table == "hosts"
    for value in (0, 0.0, -1, True, "8", 2.5):
        fits = (value == 2.5 and not is_count) or (value == 0 and value is not False and name in TIMES)
        file = written(changed(table, name, value), tmp_path)
        if fits:
            read_cluster(file)
            continue
        wanted = "a whole number above zero" if is_count else "a number above zero"
        with pytest.raises(ConfigError, match=rf"\[{table}\] has {name} = {value!r}; wanted {wanted}"):
            read_cluster(file)


@pytest.mark.parametrize(("copies", "is_per_rank"), [("rank", True), ("expert", False), ("host", None), (1, None)])
def test_rows_are_copied_for_each_rank_or_for_each_expert(
    copies: Any, is_per_rank: bool | None, tmp_path: Path
) -> None:
    file = written(changed("experts", "copies", copies), tmp_path)
    if is_per_rank is not None:
        assert read_cluster(file).is_copy_per_rank is is_per_rank
        return
    with pytest.raises(ConfigError, match=rf"\[experts\] has copies = {copies!r}; wanted rank or expert"):
        read_cluster(file)


@pytest.mark.parametrize("table", WHOLE)
def test_a_name_that_a_table_does_not_have_is_refused_with_those_that_it_has(table: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"\[{table}\] has gb; wanted some of {', '.join(WHOLE[table])}"):
        read_cluster(written(changed(table, "gb", 1), tmp_path))


@pytest.mark.parametrize("text", [b"\xff = 1", b"[device", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_named(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"c\.toml is not TOML: "):
        read_cluster(tmp_path / "c.toml")


def test_the_tables_of_these_tests_are_written_as_toml_reads_them(tmp_path: Path) -> None:
    assert tomllib.loads(written(WHOLE, tmp_path).read_text()) == WHOLE
