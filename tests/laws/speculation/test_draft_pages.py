"""Draft tokens are drawn from the distribution of dense torch for any page size: one token, and
more than one prefill chunk. All other laws of drafts use pages of four.

Each page size comes with its own chunk size. Texts have random acceptance, and the second is partly
in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.runtime.memory.pools import ReqToTokenPool
from sglcore.runtime.speculative import speculation_bring_up
from tests.laws.proposers import PROPOSERS, Proposers, proposers_fixture
from tests.laws.speculation import test_block_laws as blocks
from tests.laws.speculation import test_draft_laws as chains
from tests.laws.speculation import test_frozen_laws as frozen
from tests.laws.speculation import test_tree_kinds as kinds
from tests.laws.speculation import test_tree_laws as trees
from tests.laws.speculation.test_draft_laws import TOLERANCE

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.needs("device")

proposers = proposers_fixture()

PAGES: Mapping[int, Mapping[str, int]] = MappingProxyType(
    {
        1: MappingProxyType({"page_size": 1, "max_batch_tokens": 3}),
        16: MappingProxyType({"page_size": 16, "max_batch_tokens": 13}),
    }
)
CHAINS = ("eagle", "eagle3", "mtp")
TREES = tuple(name for name, each in PROPOSERS.items() if each.is_tree)
DRAFTS = (*CHAINS, *TREES, "frozen-mtp", "dflash")


def difference(proposers: Proposers, name: str, monkeypatch: Patch, **settings: Any) -> float:
    """Return the largest difference of log-probabilities over all draft tokens of one drafter after
    a few texts."""
    (folder, dense), target, kind = proposers.of(name), proposers.target, PROPOSERS[name].kind
    if PROPOSERS[name].is_tree:
        where = {"draft_model": str(folder / "draft")} if (folder / "draft").is_dir() else {}
        base = kinds.RECORDED.get(kind, trees.RecordingTrees)
        part = kinds.NAMES.get(kind, "TreeDrafter")
        oracle = kinds.DenseModel(dense) if kind == "standalone" else dense
        return trees.difference((target, folder, oracle), kind, monkeypatch, base, part, **where, **settings)
    if name == "frozen-mtp":
        return frozen.difference(frozen.Made(target, folder, dense), **settings)
    if name == "dflash":
        return blocks.difference((target, folder, dense), **settings)
    return chains.run(folder, kind, dense, target, **settings)


@pytest.mark.parametrize("size", PAGES)
@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_in_pages_of_any_size_are_drawn_of_what_dense_torch_gives(
    proposers: Proposers, name: str, size: int, monkeypatch: Patch
) -> None:
    assert difference(proposers, name, monkeypatch, graph="off", **PAGES[size]) < TOLERANCE


class Mistaken(ReqToTokenPool):
    """Mutant: assumes smaller or larger pages than there are. For larger ones it maps all to the
    first eight pages, so that the KV slots exist."""

    def __init__(self, table: ReqToTokenPool, least: int, most: int) -> None:
        self.table, self.page_size = table, min(max(table.page_size, least), most)
        self.max_pages = max(table.max_tokens // self.page_size, table.max_pages)
        self.given: list[Tensor] = []

    @property
    def page_table(self) -> Tensor:  # type: ignore[override]
        """Return the page table now, padded to the assumed number of columns. All tables are kept,
        because a kernel holds only the address."""
        found = self.table.page_table
        if self.page_size == self.table.page_size:
            return found
        if self.page_size > self.table.page_size:
            found = found % 8
        self.given.append(torch.nn.functional.pad(found, (0, self.max_pages - self.table.max_pages)))
        return self.given[-1]


@pytest.mark.needs("graphs.native")
@pytest.mark.parametrize(("size", "least", "most"), [(1, 2, 16), (16, 1, 8)])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_that_mistakes_the_size_of_pages_shows(
    proposers: Proposers, name: str, size: int, least: int, most: int, monkeypatch: Patch
) -> None:
    """The mutant fails at one page size, and at no other."""
    made = speculation_bring_up.Pools
    monkeypatch.setattr(speculation_bring_up, "Pools", lambda table, *rest: made(Mistaken(table, least, most), *rest))
    assert difference(proposers, name, monkeypatch, graph="off") < TOLERANCE
    assert difference(proposers, name, monkeypatch, graph="off", **PAGES[size]) > 0.01
