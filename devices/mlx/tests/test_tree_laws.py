"""Tests with draft trees of the embedded model's drafts: tokens and log-probabilities are those of
plain decode, and acceptance is that of the processor's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests import test_draft_texts as texts
from devices.mlx.tests.parity import TokenEngine
from devices.mlx.tests.running import running
from devices.mlx.tests.speculating import SAMPLING, Ran, check_same, run
from devices.mlx.tests.test_draft_texts import CELLS, SETTINGS, prompts
from devices.mlx.tests.test_in_place import bytes_beside
from devices.mlx.tests.test_speculative import constrain
from sglcore.engine.start import embedded_model
from sglcore_mlx.forward import DecodeForward
from sglcore_mlx.pool import DeviceState
from sglcore_mlx.speculative import tree_stepper as module
from sglcore_mlx.speculative.tree_stepper import TreeStepper

KINDS = ("eagle3", "mtp-layers", "standalone")
TREE: Mapping[str, Any] = MappingProxyType({"draft_width": 3, "draft_depth": 4, "draft_tokens": 8})
FREE: tuple[Mapping[str, Any], ...] = (*SAMPLING[:3], SAMPLING[4], SAMPLING[6], *SAMPLING[:2])
"""No request has penalties, so that trees stay trees."""
Patch = pytest.MonkeyPatch


def opened(kind: str, **settings: Any) -> TokenEngine:
    engine = texts.opened(kind, **{**TREE, **settings})
    if settings.get("device", "mlx") == "mlx":
        assert isinstance(engine.worker._stepper, TreeStepper)  # type: ignore[attr-defined]
    return engine


def served(engine: TokenEngine, samplings: Any = FREE, **how: Any) -> Ran:
    return run(engine, prompts(), samplings, **how)


@pytest.fixture(scope="module")
def plain() -> Iterator[TokenEngine]:
    """An engine without speculation."""
    with TokenEngine(embedded_model(), **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted(plain: TokenEngine) -> Ran:
    """The results without speculation."""
    return served(plain)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_change_no_text(wanted: Ran, kind: str, graph: str, overlap: bool) -> None:
    with opened(kind, graph=graph) as engine:
        found = served(engine, overlap=overlap, stagger=2, chunk=16)
    check_same(found, wanted)
    assert 0 < found.accepted < found.proposed


@pytest.mark.parametrize("kind", KINDS)
def test_neither_retraction_nor_cached_pages_change_one(wanted: Ran, kind: str) -> None:
    with opened(kind, draft_tokens=4, draft_depth=3) as engine:
        session = engine.session(pages=56)
        for hits in (False, True):
            found = served(engine, session=session)
            check_same(found, wanted)
            assert (found.hits > 0) >= hits
    assert found.retractions > 0


def test_penalties_and_grammars_make_chains_and_change_no_text(plain: TokenEngine) -> None:
    penalised, bound = run(plain, prompts()), run(plain, prompts(), prepare=constrain)
    with opened("eagle3") as engine:
        check_same(run(engine, prompts(), stagger=3), penalised)
        check_same(run(engine, prompts(), prepare=constrain), bound)


def test_accepted_paths_leave_the_likeliest_branch(wanted: Ran, monkeypatch: Patch) -> None:
    right, paths = module.walk, list[list[int]]()

    def watched(*given: Any) -> Any:
        runs, path = right(*given)
        for nodes, accepted in zip(np.array(path), np.array(runs.accepted), strict=True):
            paths.append(nodes[: accepted + 1].tolist())
        return runs, path

    monkeypatch.setattr(module, "walk", watched)
    with opened("eagle3", graph="off") as engine:
        check_same(served(engine), wanted)
    assert all(path == sorted(path) for path in paths)
    assert sum(path != list(range(len(path))) for path in paths) > 10


@pytest.mark.needs("torch")
@pytest.mark.parametrize("kind", ["eagle3", "mtp-layers"])
def test_what_is_proposed_and_right_is_what_it_is_on_the_processors_device(kind: str) -> None:
    found: list[Ran] = []
    for device in ("mlx", "cpu"):
        with opened(kind, device=device) as engine:
            found.append(served(engine, overlap=False))
    mine, theirs = found
    assert mine.tokens == theirs.tokens
    # Two candidates that are equally likely to within float32's rounding may be exchanged.
    assert abs(mine.accepted - theirs.accepted) <= 3 and abs(mine.decodes - theirs.decodes) <= 3
    assert mine.accepted > 40


@pytest.mark.parametrize("graph", ["off", "compiled"])
def test_steps_with_trees_copy_no_cells(graph: str) -> None:
    settings: dict[str, Any] = {"kv_cache_memory": CELLS, "dtype": "float32", "graph": graph, **TREE}
    with running(speculative="eagle3", **settings) as built:
        layer = min(built["pools"].draft_cells[0].nbytes, built["pools"].cells[0].nbytes)
        assert layer > 8 << 20
        assert bytes_beside(built, prompts=3) < layer


class _Copies(TreeStepper):
    """Makes the KV cache of a layer again, while something still holds it."""

    def _decide(self, *given: Any) -> Any:
        made = super()._decide(*given)
        nothing = mx.minimum(mx.max(made.runs.accepted), 0).astype(mx.float32)
        self._held = self._state.cells[0]
        self._state.cells[0] = self._held + nothing
        return made


def test_a_copy_of_the_cells_is_seen() -> None:
    with running(speculative="eagle3", kv_cache_memory=CELLS, dtype="float32", graph="off", **TREE) as built:
        built["worker"]._stepper.__class__ = _Copies
        assert bytes_beside(built, prompts=3) > built["pools"].cells[0].nbytes


def moves_nothing(patch: Patch) -> None:
    """The entries of accepted nodes stay where they are."""
    own = DeviceState.take_moved

    def forget(self: DeviceState) -> list[mx.array]:
        own(self)
        return []

    patch.setattr(DeviceState, "take_moved", forget)


def moves_after_prompts_are_lost(patch: Patch) -> None:
    """A prefill does not write what the step before left."""
    right = module.TreeStepper._extend

    def lost(self: Any, batch: Any) -> Any:
        self._state.take_moved()
        return right(self, batch)

    patch.setattr(module.TreeStepper, "_extend", lost)


def sees_other_branches(patch: Patch) -> None:
    """Nodes see all nodes before them."""
    own = DecodeForward._batch

    def unmasked(self: Any, given: Any, *rest: Any) -> Any:
        return own(self, {name: each for name, each in given.items() if name != "visible"}, *rest)

    patch.setattr(DecodeForward, "_batch", unmasked)


def positions_by_number(patch: Patch) -> None:
    """A node has the position of its KV slot."""
    right = module.TreeStepper._place
    patch.setattr(
        module.TreeStepper, "_place", lambda *given: (made := right(*given)) and replace(made, positions=made.places)
    )


def walks_one_further(patch: Patch) -> None:
    """A node more is accepted."""
    right = module.walk

    def further(*given: Any) -> Any:
        runs, path = right(*given)
        return replace(runs, accepted=mx.minimum(runs.accepted + 1, given[-1] - 1)), path

    patch.setattr(module, "walk", further)


@pytest.mark.parametrize(
    "defect",
    [moves_nothing, moves_after_prompts_are_lost, sees_other_branches, positions_by_number, walks_one_further],
    ids=lambda each: each.__name__,
)
def test_a_defect_of_verified_trees_changes_a_text(
    wanted: Ran, defect: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    defect(monkeypatch)
    with opened("eagle3", graph="off") as engine, pytest.raises(AssertionError):
        check_same(served(engine, stagger=2, chunk=16), wanted)
