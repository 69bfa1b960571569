"""The kit on a device with page-major keys and values: every law holds, and code that assumes
cell-major storage is caught."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from sglcore.conformance.catalogue import LAWS
from sglcore.conformance.kit_run import Kit, catches, run_case
from sglcore.conformance.law import Law
from sglcore.conformance.mutant import Mutant, become
from sglcore.conformance.reference_parts import BRING_UP, REFERENCE
from sglcore.conformance.target import Target
from sglcore.core.errors import ConfigError
from sglcore.runtime.attention.contract import AttentionFacts
from sglcore.runtime.attention.page_rows import PageRowsAttention, RowsPlan
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import PAGE_MAJOR, PER_HEAD_BY_PAGE, PoolKind


class ByPage(PageRowsAttention):
    """A vendor's call over pages that keep each head's tokens together."""

    facts = AttentionFacts(features=frozenset({"mixed"}), takes_stored=True, layouts=(PAGE_MAJOR,))

    def attend_pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: RowsPlan, layer: Any) -> Tensor:
        """Attend one row after the other."""
        outs: list[Tensor] = []
        for row, length in enumerate(plan.seq_lens.tolist()):
            queries = q[int(plan.starts[row]) : int(plan.starts[row + 1])].transpose(0, 1)
            keys, values = (
                part[plan.pages[row]].transpose(0, 1).flatten(1, 2)[:, :length] for part in (k_pages, v_pages)
            )
            mask = torch.ones(queries.shape[1], length, dtype=torch.bool).tril(length - queries.shape[1])
            out = sdpa(queries[None], keys[None], values[None], mask, scale=layer.scaling, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)


class ByCell(ByPage):
    """The same call by a backend that supports the cell-major layout only and declares it."""

    facts = replace(ByPage.facts, layouts=AttentionFacts().layouts)

    def attend_pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: RowsPlan, layer: Any) -> Tensor:
        """Attend over pages [pages, page size, heads, dim], turned to page-major."""
        return super().attend_pages(q, k_pages.transpose(1, 2), v_pages.transpose(1, 2), plan, layer)


def pool_kind() -> PoolKind:
    """The page-major pool kind of this device."""
    return PER_HEAD_BY_PAGE


ORDER = BRING_UP.insert(pool_kind, before="sizes")
DEVICE = Target(
    replace(
        REFERENCE.package,
        name="pages",
        attention={
            "by_cell": f"{__name__}:ByCell",
            "by_page": f"{__name__}:ByPage",
            **REFERENCE.package.attention,
        },
        bring_up=f"{__name__}:ORDER",
        kernels={"own": f"{__name__}:kernels"},
    ),
    "sglcore",
)


def stores_cells(*given: Any) -> Tensor:
    """Stand for a kernel that rotates and stores into cells; raises, because it must not be
    called."""
    raise AssertionError("it was given pages")


def kernels() -> KernelTable:
    """The table with both kernels that store and rotate in one launch, which know the cell-major
    layout only."""
    return KernelTable().replace(rotary_and_store=stores_cells, norm_rotary_and_store=stores_cells)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "bring_up.txt").write_text(ORDER.text())
    made = Kit(replace(DEVICE, folder=folder), tmp_path_factory.mktemp("models"))
    yield made
    made.close()


def named(name: str) -> Law:
    """Return one law of the kit."""
    return next(law for law in LAWS if law.name == name)


BESIDE = ("and_store", "hybrid")
CASES = [
    (law, case)
    for law in LAWS
    if law.level != "C0"
    for case in law.cases(DEVICE)
    if not any(word in case for word in BESIDE)
]
"""All cases above C0, except those of kernels that the device lacks and of recurrent states, which
are in another pool."""


@pytest.mark.parametrize(("law", "case"), CASES, ids=[f"{law.name}-{case}" for law, case in CASES])
def test_it_holds_every_law(law: Law, case: str, kit: Kit) -> None:
    outcome = run_case(kit, law, case)
    served = not case.startswith("by_cell/") and not (case.startswith("by_page") and case.endswith("window"))
    assert outcome.verdict == ("passed" if served else "skipped"), outcome.text


def test_a_backend_of_another_layout_is_refused_and_the_ledger_says_why(kit: Kit) -> None:
    (row,) = [row for row in kit.harness("dense").started.ledger.rows if row.topic == "attention"]
    assert row.effective == "by_page"
    assert "by_cell refused: keys and values laid out page_major; it takes cell_major" in row.reason
    with pytest.raises(ConfigError, match="laid out page_major; it takes cell_major"):
        kit.open("dense", attention_backend="by_cell")


def test_a_backend_that_is_built_beside_the_selection_is_refused_too(kit: Kit) -> None:
    built = kit.harness("dense").started.built["attention"]
    parts = built.shape, built.req_to_token_pool, built.token_to_kv_pool, built.kernels
    with pytest.raises(
        ConfigError, match="ByCell was given keys and values laid out page_major; wanted one of cell_major"
    ):
        ByCell(*parts)
    assert ReferenceAttention(*parts).token_to_kv_pool is built.token_to_kv_pool


@pytest.mark.parametrize("law", ["pool_keeps_cells", "attention_is_reference"])
def test_the_laws_catch_the_same_defects_as_on_cells(law: str, kit: Kit) -> None:
    found = {mutant.name: catches(kit, named(law), mutant) for mutant in named(law).mutants}
    assert not [(name, text) for name, (caught, text) in found.items() if not caught]


def stores_cells_into_pages(base: Any) -> type:
    """Return a kind of pool that stores into its pages as if they were cell-major."""

    class StoresCellsIntoPages(base):
        def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
            keys, values = (part.view(self.num_cells, *key.shape[1:]) for part in self.kv(layer_id))
            reference_kernels.store_kv(key, value, keys, values, out_cache_loc)

    return StoresCellsIntoPages


def reads_pages_as_cells(base: Any) -> type:
    """Return a kind of backend that reads pages as if they were cell-major and does not declare
    it."""

    class ReadsPagesAsCells(base):
        __slots__ = ()
        facts = replace(base.facts, layouts=None)

        def attend_pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: Any, layer: Any) -> Tensor:
            moved = (
                part.view(part.shape[0], part.shape[2], -1, part.shape[3]).transpose(1, 2)
                for part in (k_pages, v_pages)
            )
            return super().attend_pages(q, *moved, plan, layer)

    return ReadsPagesAsCells


def planted(step: str, change: Any) -> Mutant:
    """Make a mutant that changes the result of one bring-up step."""
    return Mutant(name=change.__name__, says=change.__doc__, steps=MappingProxyType({step: change}))


def store_ignores_layout(pools: Any) -> Any:
    """A pool whose store knows cells only."""
    become(pools.token_to_kv, stores_cells_into_pages)
    return pools


def backend_ignores_layout(backend: Any) -> Any:
    """A backend that reads cells of any pool."""
    return become(backend, reads_pages_as_cells) if isinstance(backend, ByPage) else backend


def layers_ignore_layout(backend: Any) -> Any:
    """A backend that lets layers store where no entry of the table can."""
    backend.takes_stored = True
    return backend


@pytest.mark.parametrize(
    ("law", "step", "change"),
    [
        ("pool_keeps_cells", "pools", store_ignores_layout),
        ("attention_is_reference", "pools", store_ignores_layout),
        ("attention_is_reference", "attention", backend_ignores_layout),
        ("tiny", "attention", layers_ignore_layout),
    ],
)
def test_what_ignores_the_layout_is_caught(law: str, step: str, change: Any, kit: Kit) -> None:
    caught, text = catches(kit, named(law), planted(step, change))
    assert caught, text
