"""The kernel table: replaced entries, and the ledger's rows about them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.conformance.law import LawBroken
from sglcore.conformance.laws.laws_kernels import RELATIVE, compare
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.device.facts import Facts
from sglcore.runtime.bring_up import kernels as kernels_step
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.row_codec import E4M3FN, E4M3FNUZ, RowCodec
from sglcore.runtime.kernels.table import KernelTable, entry, optional

OPTIONAL = {name: entry.rests_on for name, entry in KernelTable.declared().items() if entry.is_optional}
"""Entries without a reference implementation, and the entries that they rest on."""


def fast_gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Another implementation of `gelu`."""
    return torch.nn.functional.gelu(x, approximate=approximate)


class Silu:
    """An implementation that is an object."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input unchanged."""
        return x


def test_the_origin_names_the_implementation_of_every_entry() -> None:
    origin = KernelTable().origin
    assert tuple(origin) == tuple(name for name in KernelTable.declared() if name not in OPTIONAL)
    assert origin["rms_norm"] == "sglcore.runtime.kernels.reference_kernels:rms_norm"


def test_a_replaced_entry_runs_and_says_where_it_is_from() -> None:
    first = KernelTable()
    table = first.replace(gelu=functools.partial(fast_gelu, approximate="tanh"), silu_and_mul=Silu())
    assert table.origin["gelu"] == f"{__name__}:fast_gelu"
    assert table.origin["silu_and_mul"] == f"{__name__}:Silu"
    assert table.origin["linear"] == first.origin["linear"]
    assert first.origin["gelu"] == "sglcore.runtime.kernels.reference_kernels:gelu"
    assert not torch.equal(table.gelu(torch.ones(1, 1)), first.gelu(torch.ones(1, 1)))


def test_an_optional_entry_goes_when_what_it_does_the_work_of_is_replaced() -> None:
    plain, entries = KernelTable(), {name: getattr(reference_kernels, name) for name in OPTIONAL}
    assert all(getattr(plain, name) is None for name in OPTIONAL) and {"greedy", "head"} <= OPTIONAL.keys()
    table = plain.replace(**entries)
    for given, parts in OPTIONAL.items():
        kernel = entries[given]
        assert table.origin[given] == f"sglcore.runtime.kernels.reference_kernels:{given}"
        assert getattr(table.replace(gelu=fast_gelu), given) is kernel
        for name in parts:
            part = getattr(table, name)
            assert getattr(table.replace(**{name: part}), given) is None
            assert getattr(table.replace(**{name: part, given: kernel}), given) is kernel


def called_by(code: CodeType) -> set[str]:
    """Return the names that a function and its inner functions use."""
    inner = (called_by(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_entry_rests_on_every_entry_that_its_meaning_is_made_of(name: str) -> None:
    made_of = called_by(getattr(reference_kernels, name).__code__) & KernelTable.declared().keys()
    for part in made_of & OPTIONAL.keys():
        made_of |= set(OPTIONAL[part])
    assert made_of <= set(OPTIONAL[name])


def lacking() -> KernelTable:
    """A table that refuses two libraries."""
    table = KernelTable().refusing("fast refused for gelu: not installed").refusing("other refused for silu: too old")
    return table.replace(gelu=fast_gelu)


def test_libraries_that_are_not_there_are_reasons_in_the_ledger_and_no_downgrade() -> None:
    package: Any = SimpleNamespace(name="here", kernels={"own": f"{__name__}:lacking"}, kernels_for=lambda *_: "own")
    ledger = DecisionLedger(strict=True)
    table = kernels_step(EngineConfig(), package, ledger, torch.device("cpu"))
    assert list(table.replaced) == ["gelu"]
    assert ledger.rows[-1].reason.endswith(
        "the reference elsewhere; fast refused for gelu: not installed; other refused for silu: too old"
    )
    assert not ledger.rows[-1].downgrade and KernelTable().refused == ()


def test_an_entry_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(
        ConfigError,
        match="no entry quick_gelu; wanted one of swap_in, copy_rows, rope_tail, norm_rope_store, index_key_store",
    ):
        KernelTable().replace(quick_gelu=fast_gelu)


def test_a_table_is_not_changed() -> None:
    with pytest.raises(AttributeError, match="gelu of a kernel table cannot be set"):
        KernelTable().gelu = fast_gelu  # pyright: ignore[reportAttributeAccessIssue]


# -- a new entry
# --------------------------------------------------------------------------------------------------


def scaled(x: torch.Tensor, gains: torch.Tensor, cells: torch.Tensor, power: float) -> torch.Tensor:
    """Multiply each row by its gain to a power, and add the sum of the rows to `cells`."""
    cells += x.sum(0)
    return x * gains**power


class Extended(KernelTable):
    """The table with two more entries."""

    scaled = entry(scaled, writes=("cells",), shapes=(("T H", "H", "H", 2.0),))
    twice = optional(lambda x: 2 * x, rests_on=("scaled",), shapes=(("T I",),))


def device_scaled(x: torch.Tensor, gains: torch.Tensor, cells: torch.Tensor, power: float) -> torch.Tensor:
    """A device's implementation of `scaled`."""
    torch.add(cells, x.sum(0), out=cells)
    return gains.pow(power) * x


def forgets_power(x: torch.Tensor, gains: torch.Tensor, cells: torch.Tensor, power: float) -> torch.Tensor:
    """Mutant: ignores the power."""
    return device_scaled(x, gains, cells, 1.0)


def writes_too_much(x: torch.Tensor, gains: torch.Tensor, cells: torch.Tensor, power: float) -> torch.Tensor:
    """Mutant: returns the correct result and writes another argument too."""
    found = device_scaled(x, gains, cells, power)
    gains += 1
    return found


def writes_nothing(x: torch.Tensor, gains: torch.Tensor, cells: torch.Tensor, power: float) -> torch.Tensor:
    """Mutant: returns the result and does not write `cells`."""
    return gains.pow(power) * x


def held_against_its_reference(table: KernelTable, case: str) -> None:
    """Run the kit's law that compares kernels, as for a device."""
    trial: Any = SimpleNamespace(case=case, note=lambda *seen: None, tolerance=RELATIVE.__getitem__)
    compare(trial, table, Facts(tensor_device="cpu"))


def test_one_declaration_brings_a_kernel_into_the_table_the_ledger_and_the_law() -> None:
    plain = Extended()
    assert plain.scaled is scaled and plain.twice is None
    assert plain.origin["scaled"] == f"{__name__}:scaled" and plain.replaced == {}
    table = plain.replace(scaled=device_scaled)
    assert table.replaced == {"scaled": f"{__name__}:device_scaled"}
    assert table.rms_norm is plain.rms_norm
    full = table.replace(twice=lambda x: x + x)
    assert full.twice is not None and full.replace(scaled=scaled).twice is None
    for held in (plain, full):
        held_against_its_reference(held, "scaled")
    held_against_its_reference(full, "twice")


@pytest.mark.parametrize("defect", [forgets_power, writes_too_much, writes_nothing])
def test_a_broken_kernel_of_a_new_entry_is_caught(defect: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(LawBroken, match="scaled, "):
        held_against_its_reference(Extended().replace(scaled=defect), "scaled")


def test_a_table_says_which_8_bit_floats_rows_are_kept_in() -> None:
    table = KernelTable().refusing("fast refused for gelu: too old").storing(E4M3FNUZ)
    again = table.replace(gelu=fast_gelu).refusing("other refused for silu: too old")
    assert KernelTable().float8 == E4M3FN and again.float8 == E4M3FNUZ
    assert len(again.refused) == 2 and again.storing(E4M3FN).refused == again.refused
    with pytest.raises(ConfigError, match="'e5m2'; wanted one of e4m3fn, e4m3fnuz"):
        table.storing("e5m2")


def scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    token_slots: torch.Tensor,
    lens: torch.Tensor,
    rows_per_page: int,
    scale: float,
    width: int,
    codec: RowCodec | None,
    float8: str | None = None,
) -> torch.Tensor:
    """An implementation of `index_logits` that decodes rows in `float8`, if given, instead of the
    codec's type."""
    own = codec and replace(codec, float8=float8 or codec.float8)
    places = torch.arange(width)
    pages = table[token_slots][:, (places // rows_per_page).clamp(max=table.shape[1] - 1)]
    rows = keys[pages * rows_per_page + places % rows_per_page]
    values = rows.float() if own is None else own.decode(rows.flatten(0, 1)).view(*rows.shape[:2], q.shape[2])
    found = torch.einsum("thd,twd->thw", q.float(), values).relu() * weights.float().unsqueeze(2) * scale
    return found.sum(1).masked_fill(places >= lens.unsqueeze(1), -torch.inf)


def test_a_table_that_does_not_read_the_form_it_names_is_caught() -> None:
    one_form = functools.partial(scores, float8=E4M3FN)
    held_against_its_reference(KernelTable(index_logits=scores).storing(E4M3FNUZ), "index_logits")
    held_against_its_reference(KernelTable(index_logits=one_form), "index_logits")
    with pytest.raises(LawBroken, match="index_logits"):
        held_against_its_reference(KernelTable(index_logits=one_form).storing(E4M3FNUZ), "index_logits")


def many() -> KernelTable:
    """A table that replaces more entries than one line can list."""
    names = (
        "gelu",
        "silu_and_mul",
        "rms_norm",
        "add_rms_norm",
        "rotary",
        "store_kv",
        "moe",
        "clamped_moe",
        "limited_moe",
    )
    return KernelTable().replace(**dict.fromkeys(names, fast_gelu))


def test_a_table_of_many_entries_is_one_line_of_the_ledger() -> None:
    package: Any = SimpleNamespace(name="here", kernels={"own": f"{__name__}:many"}, kernels_for=lambda *_: "own")
    ledger = DecisionLedger(strict=True)
    kernels_step(EngineConfig(), package, ledger, torch.device("cpu"))
    assert ledger.rows[-1].reason == "tests.kernels, for 9 entries; the reference elsewhere"
