"""Draft trees in whole engines: the candidates after each beam are ranked by the distribution that
dense torch gives on the resulting text and the beam's own path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from devices.mlx.tests.parity import Result, TokenEngine
from devices.mlx.tests.test_draft_laws import TOLERANCE, drafts, features_of
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore_mlx.attention import tail
from sglcore_mlx.speculative import drafter
from sglcore_mlx.speculative.tree_stepper import TreeStepper

__all__ = ["drafts"]

pytestmark = pytest.mark.needs("torch")
WIDTH, DEPTH = 3, 4
KINDS = ("eagle", "eagle3", "mtp", "standalone")


class Grown(NamedTuple):
    """The beams of one step: request slots [B], KV slots used [B], and by depth the
    log-probabilities [B, b, V] after each beam, with the beams' tokens and origins [B, w] that
    followed."""

    slots: NDArray[np.int32]
    cells: NDArray[np.int32]
    logprobs: list[NDArray[np.float32]]
    beams: list[tuple[NDArray[np.int32], NDArray[np.int32]]]


class Recording(TreeStepper):
    """Records the distributions after all beams. It waits for the device."""

    steps: list[Grown]

    def _store(self, slots: mx.array, page_table: Any, begun: Any, roots: Any, lengths: mx.array, width: int) -> None:
        own, count = self._sampling.ranking, slots.shape[0]
        ranked, beams = list[Any](), list[Any]()

        def recorded(width: int) -> Callable[..., Any]:
            rank = own(width)

            def remember(logits: mx.array, positions: mx.array, most: int) -> Any:
                found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
                ranked.append(np.array(found).reshape(count, -1, found.shape[-1]))
                return rank(logits, positions, most)

            return remember

        class Records(drafter.TreeRecords):
            def expand(self, *given: mx.array) -> Any:
                made = super().expand(*given)
                beams.append((np.array(made.tokens), np.array(made.origins)))
                return made

        whole, drafter.TreeRecords = drafter.TreeRecords, Records
        self._sampling.ranking = recorded
        try:
            super()._store(slots, page_table, begun, roots, lengths, width)
        finally:
            drafter.TreeRecords, self._sampling.ranking = whole, own
        if ranked:
            self.steps.append(Grown(np.array(slots), np.array(lengths[:count]), ranked, beams))


def furthest(
    target: Any, dense: Any, kind: str, results: Sequence[Result], steps: Sequence[Grown]
) -> tuple[float, int]:
    """Return the largest difference of log-probabilities, and the number of beams compared. Steps
    after the end of a text are discarded. Request i is in slot i + 1."""
    worst, count, unwritten = 0.0, 0, int(kind == "standalone")
    texts = [result.prompt + result.tokens for result in results]
    features = [features_of(target, text, kind) for text in texts]
    before = dict.fromkeys(range(len(texts)), 0)
    for step in steps:
        for row, (slot, cells) in enumerate(zip(step.slots.tolist(), step.cells.tolist(), strict=True)):
            index = slot - 1
            text = texts[index]
            if not before[index] < cells < len(text) - unwritten:
                continue
            before[index] = cells
            paths: list[list[int]] = [[]]
            for logprobs, (tokens, origins) in zip(step.logprobs, step.beams, strict=True):
                for found, path in zip(logprobs[row], paths, strict=True):
                    given = text[1 : cells + 1], features[index][:cells], path
                    wanted = dense.propose(*given, *([text[0]] if kind == "standalone" else []))[len(path)].numpy()
                    number, count = np.isfinite(wanted), count + 1
                    if (np.isfinite(found) != number).any():
                        return np.inf, count
                    worst = max(worst, float(np.abs(found[number] - wanted[number]).max()))
                pairs = zip(tokens[row].tolist(), origins[row].tolist(), strict=True)
                paths = [[*paths[origin], token] for token, origin in pairs]
    return worst, count


def run(folder: Path, kind: str, dense: Any, target: Any, **settings: Any) -> float:
    """Run three texts with trees; return the largest difference."""
    where = {} if kind == "mtp" else {"draft_model": str(folder / "draft")}
    given = {"draft_width": WIDTH, "draft_depth": DEPTH, "draft_tokens": 8, "poison": True, **where, **settings}
    with TokenEngine(folder, speculative=kind, kv_cache_memory=8 << 20, **given) as engine:
        stepper: Any = engine.worker._stepper  # type: ignore[attr-defined]
        stepper.__class__, stepper.steps = Recording, []
        session = engine.session(stagger=1, chunk=8, overlap=False)
        found = session.run(random_prompts(5, (21, 6, 13)), 10, temperature=1.0)
        worst, count = furthest(target, dense, kind, found, stepper.steps)
    assert count > 100
    return worst


@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_ranked_by_what_dense_torch_gives_on_each_beams_path(drafts: Any, kind: str, graph: str) -> None:
    target, made = drafts
    folder, dense = made[kind]
    assert run(folder, kind, dense, target, graph=graph) < TOLERANCE


def beams_see_each_other(patch: pytest.MonkeyPatch) -> None:
    """A beam sees all draft tokens before it."""
    patch.setattr(tail, "is_visible", lambda words, before: before >= 0)


def beams_of_other_parents(patch: pytest.MonkeyPatch) -> None:
    """A beam reads the output of the first beam."""
    right = drafter.parents_of
    patch.setattr(
        drafter,
        "parents_of",
        lambda hidden, beams, depth: right(hidden, beams._replace(origins=beams.origins * 0), depth),
    )


def beams_one_further(patch: pytest.MonkeyPatch) -> None:
    """Beams have the position of the token after them."""
    right: Any = drafter.ModelDrafter.beams

    def further(self: Any, *given: Any) -> Any:
        *rest, positions, visible = given
        return right(self, *rest, positions + 1, visible)

    patch.setattr(drafter.ModelDrafter, "beams", further)


@pytest.mark.parametrize(
    "defect", [beams_see_each_other, beams_of_other_parents, beams_one_further], ids=lambda each: each.__name__
)
def test_beams_that_read_wrongly_show(drafts: Any, defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, made = drafts
    folder, dense = made["eagle3"]
    defect(monkeypatch)
    assert run(folder, "eagle3", dense, target, graph="off") > 0.02
