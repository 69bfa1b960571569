"""What a package gives the kit: a wider tolerance takes effect, appears with every result, and is
an error if it is invalid or widens nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.conformance.catalogue import LAWS
from sglcore.conformance.fixture import (
    Fixture,
    Tolerance,
    read_fixture,
    stale_tolerances,
    tolerance_text,
    tolerance_values,
)
from sglcore.conformance.kit_run import Kit, catches, run_case
from sglcore.conformance.law import Law
from sglcore.conformance.mutant import Mutant, become
from sglcore.conformance.reference_parts import REFERENCE
from sglcore.conformance.result import make_result, write_result
from sglcore.conformance.support_table import support_table
from sglcore.conformance.target import Target
from sglcore.core.errors import ConfigError
from tests.conformance.test_other_runtime import BOX

TEXT = """
[[tolerance]]
law = "pool_keeps_cells"
dtype = "float32"
bound = 0.01
reason = "cells are kept in bfloat16"
"""
WIDER = Tolerance("pool_keeps_cells", "float32", 0.01, "cells are kept in bfloat16")


def written(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "conformance.toml").write_text(text)
    return folder


def law() -> Law:
    """The law that these tests use."""
    return next(law for law in LAWS if law.name == WIDER.law)


def test_a_fixture_is_read_from_the_packages_folder(tmp_path: Path) -> None:
    assert read_fixture(written(tmp_path, TEXT)) == Fixture((WIDER,))
    assert read_fixture(written(tmp_path, 'cells = "acme.kit:cells"' + TEXT)) == Fixture((WIDER,), "acme.kit:cells")
    assert read_fixture(written(tmp_path, "")) == read_fixture(None) == read_fixture(tmp_path / "nowhere") == Fixture()


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("reason", "because"),
        TEXT.replace('"cells are kept in bfloat16"', '""'),
        TEXT.replace("0.01", '"0.01"'),
        TEXT.replace("0.01", "true"),
        TEXT.replace("[[tolerance]]", "[tolerance]"),
        TEXT + "\nlink = 'x'\n",
        "cells = 3\n",
        "[[hole]]\n",
        "[[tolerance\n",
    ],
)
def test_what_is_no_fixture_is_an_error_that_shows_one(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"conformance\.toml .*; wanted"):
        read_fixture(written(tmp_path, text))


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ([WIDER], []),
        ([replace(WIDER, law="none")], ["'none' in float32 matches no law"]),
        ([replace(WIDER, law="retraction", dtype="int8")], ["'retraction' in int8 matches no law that compares"]),
        ([replace(WIDER, law="tiny", bound=1e-4)], ["'tiny' in float32 is 0.0001; the law's own is 0.0002"]),
        ([replace(WIDER, law="tiny", bound=2e-4)], ["'tiny' in float32 is 0.0002; the law's own is 0.0002"]),
        ([replace(WIDER, bound=float("inf"))], ["is inf; the law's own is 0"]),
        ([WIDER, WIDER], ["there are two tolerances of 'pool_keeps_cells' in float32"]),
    ],
)
def test_a_tolerance_that_widens_nothing_is_an_error(items: list[Tolerance], told: list[str]) -> None:
    wrong = stale_tolerances(Fixture(tuple(items)), LAWS)
    assert len(wrong) == len(told) and all(part in text for part, text in zip(told, wrong, strict=True))


def rounds(base: Any) -> type:
    """Store keys and values in bfloat16 precision instead of the model's dtype."""

    class Rounds(base):
        def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
            super().store(layer_id, *(part.bfloat16().to(part.dtype) for part in (key, value)), out_cache_loc)

    return Rounds


def rounding(pools: Any) -> Any:
    """Mutant: a pool that rounds the keys and values that it stores."""
    become(pools.token_to_kv, rounds)
    return pools


def rounding_device(folder: Path, text: str) -> Target:
    """The reference over such a pool, with a fixture."""
    defect = Mutant(name="rounds", says="", steps=MappingProxyType({"pools": rounding}))
    return replace(REFERENCE.broken_by(defect), folder=written(folder, text))


@pytest.mark.parametrize(
    ("text", "verdict"), [("", "failed"), (TEXT, "passed"), (TEXT.replace("0.01", "0.0001"), "failed")]
)
def test_a_law_allows_a_package_what_its_fixture_says(text: str, verdict: str, tmp_path: Path) -> None:
    kit = Kit(rounding_device(tmp_path / "package", text), tmp_path)
    outcome = run_case(kit, law(), "")
    kit.close()
    assert outcome.verdict == verdict and outcome.max_error == outcome.errors["float32"] > 1e-3, outcome.text


def test_other_laws_and_other_packages_are_allowed_what_they_were(tmp_path: Path) -> None:
    fixture = read_fixture(written(tmp_path, TEXT))
    assert [fixture.bound(law(), dtype) for dtype in ("float32", "bfloat16")] == [0.01, 0.0]
    tiny = next(law for law in LAWS if law.name == "tiny")
    assert fixture.bound(tiny, "float32") == tiny.tolerance["float32"]


def test_a_wider_tolerance_lets_no_broken_pool_pass(tmp_path: Path) -> None:
    kit = Kit(replace(REFERENCE, folder=written(tmp_path / "package", TEXT)), tmp_path)
    assert all(catches(kit, law(), mutant)[0] for mutant in law().mutants)


@pytest.mark.parametrize(("largest", "is_wide"), [(0.004, False), (0.0009, True), (0.0, True)])
def test_it_stands_in_the_result_and_in_the_table(largest: float, is_wide: bool, tmp_path: Path) -> None:
    target = replace(REFERENCE, folder=written(tmp_path / "package", TEXT))
    kit = Kit(target, tmp_path)
    outcome = replace(run_case(kit, law(), ""), errors={"float32": largest})
    kit.close()
    values = make_result(target, [outcome], [], level="C3", hardware="board A", problems=())
    (found,) = values["tolerances"]
    assert (found["bound"], found["own"], found["reason"], found["is_wide"]) == (0.01, 0.0, WIDER.reason, is_wide)
    write_result(tmp_path / "results" / "a.json", values)
    *_, blank, line = support_table(tmp_path / "results").splitlines()
    assert blank == "" and line.startswith(
        "- reference, board A: pool_keeps_cells in float32 allows 0.01 where the law allows 0 (cells are kept in bfloat16)"
    )
    assert line.endswith("10 times less than is allowed: narrow it") == is_wide


def test_a_tolerance_is_wide_by_the_largest_error_of_all_cases() -> None:
    errors = [(name, {"float32": error}) for name, error in (("pool_keeps_cells", 0.004), ("pool_keeps_cells", 1e-4))]
    for seen in (errors, errors[::-1]):
        (found,) = tolerance_values(Fixture((WIDER,)), LAWS, [*seen, ("tiny", {"float32": 0.5})])
        assert found["largest"] == 0.004 and not found["is_wide"]


def test_a_tolerance_in_whose_dtype_nothing_ran_says_so() -> None:
    (found,) = tolerance_values(Fixture((WIDER,)), LAWS, [("pool_keeps_cells", {"bfloat16": 0.5})])
    assert found["largest"] is None and not found["is_wide"] and tolerance_text(found).endswith("nothing ran in it")


class Cells:
    """Gives the kit access to the KV slots of a device that starts in one opaque step; arrays are
    on the host."""

    def __init__(self, built: Any) -> None:
        self._pool = pool = built["worker"].runner.attn_backend.token_to_kv_pool
        self.page_size, self.num_cells, self.num_layers = pool.page_size, pool.num_cells, pool.num_layers
        self.dtype = "float32"

    def read_cells(self, layer_id: int, cells: Any) -> Any:
        return tuple(part.numpy() for part in self._pool.read_cells(layer_id, torch.from_numpy(cells)))

    def write_cells(self, layer_id: int, cells: Any, keys: Any, values: Any) -> None:
        self._pool.write_cells(layer_id, *map(torch.from_numpy, (cells, keys, values)))


class Beside(Cells):
    """Writes to the KV slot after the requested one."""

    def write_cells(self, layer_id: int, cells: Any, keys: Any, values: Any) -> None:
        super().write_cells(layer_id, (cells + 1) % self.num_cells, keys, values)


@pytest.mark.parametrize(("name", "verdict"), [("", "skipped"), ("Cells", "passed"), ("Beside", "failed")])
def test_a_device_of_another_runtime_may_let_the_kit_at_its_cells(name: str, verdict: str, tmp_path: Path) -> None:
    text = f'cells = "{__name__}:{name}"\n' if name else ""
    target = replace(BOX, folder=written(tmp_path / "package", text))
    assert ("cells" in target.capabilities()) == bool(name)
    kit = Kit(target, tmp_path)
    outcome = run_case(kit, law(), "")
    assert outcome.verdict == verdict, outcome.text
    padding = next(law for law in LAWS if law.name == "padding_is_inert")
    assert run_case(kit, padding, "off").verdict == "passed"
    kit.close()
