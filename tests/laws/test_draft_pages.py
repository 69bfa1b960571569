"""What a draft proposes is drawn of what dense torch gives on the text in pages of any size: of one token, and of more than a slice of a
prompt has. Pages of four are what every other law of drafts has.

Each size comes with slices of its own, and texts of random acceptance, of which the second is partly in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from tests.laws import test_block_laws as blocks
from tests.laws import test_draft_laws as chains
from tests.laws import test_frozen_laws as frozen
from tests.laws import test_tree_kinds as kinds
from tests.laws import test_tree_laws as trees
from tests.laws.proposers import PROPOSERS, Proposers
from tests.laws.test_draft_laws import TOLERANCE

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.needs("device")

PAGES: Mapping[int, Mapping[str, int]] = MappingProxyType(
    {
        1: MappingProxyType({"page_size": 1, "max_batch_tokens": 3}),
        16: MappingProxyType({"page_size": 16, "max_batch_tokens": 13}),
    }
)
CHAINS = ("eagle", "eagle3", "mtp")
TREES = tuple(name for name, each in PROPOSERS.items() if each.is_tree)
DRAFTS = (*CHAINS, *TREES, "frozen-mtp", "dflash")


@pytest.fixture(scope="module")
def proposers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proposers]:
    """Of all kinds."""
    made = Proposers(tmp_path_factory.mktemp("proposers"))
    yield made
    made.close()


def difference(proposers: Proposers, name: str, monkeypatch: Patch, **settings: Any) -> float:
    """The largest one of log-probabilities, of all that one draft proposes after a few texts."""
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
