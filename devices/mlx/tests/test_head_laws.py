"""Several MTP layers with one draft token each, in whole engines: each token is drawn from the
distribution of dense torch on the resulting text, for any number of accepted tokens, and none
changes a text."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.parity import Result, TokenEngine
from devices.mlx.tests.test_draft_laws import TOLERANCE, Recording, furthest, opened
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.core.errors import ConfigError
from sglcore_mlx.speculative import head_drafter
from sglcore_mlx.speculative.draft_stepper import DraftStepper
from sglcore_mlx.speculative.head_drafter import HeadDrafter

pytestmark = pytest.mark.needs("torch")

if find_spec("torch") is not None:
    from tests.checkpoints import llama, qwen2
    from tests.drafts import TARGET, next_tokens
    from tests.latent import deepseek_v3

HEADS = 3
FIRST, OTHER, THIRD = random_prompts(5, (21, 6, 13))
Made = tuple[Any, Path, Any, list[list[Result]]]


class Steered(Recording):
    """Records, and then puts a random number of correct tokens first, so that every number of
    accepted tokens occurs. It waits for the device."""

    texts: list[list[int]]
    random: np.random.Generator

    def _store(self, slots: mx.array, *given: Any) -> None:
        super()._store(slots, *given)
        table = np.array(self._drafts.proposals)
        lengths = np.array(self._drafts.lengths)
        known = np.array(self._state.made_history)
        roots = np.array(self._state.last)
        for slot in np.array(slots):
            end = int(lengths[slot])
            text = next((each for each in self.texts if self._is_of(each, known[slot], end, int(roots[slot]))), None)
            if text is not None:
                count = int(self.random.integers(HEADS + 1))
                right = text[end + 1 : end + 1 + count]
                table[slot] = (np.abs(table[slot]) + 1) % 90
                table[slot, : len(right)] = right
        self._drafts.proposals = mx.array(table)

    @staticmethod
    def _is_of(text: list[int], known: Any, end: int, root: int) -> bool:
        return end < len(text) and text[end] == root and text[: end - HEADS] == known[: end - HEADS].tolist()


def ran(engine: TokenEngine, overlap: bool) -> list[list[Result]]:
    """Run a text by chunks, one with its prefix, and three at once that join one by one."""
    session = engine.session(chunk=8, scramble=2, overlap=overlap)
    found = [session.run(prompts, 12, temperature=1.0) for prompts in ([FIRST], [[*FIRST[:18], 3]], [OTHER])]
    joined = engine.session(stagger=1, chunk=5, overlap=overlap)
    return [*found, joined.run([OTHER, THIRD, FIRST], 14, temperature=1.0)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """A target, its folder, its layers in dense torch, and the texts without draft tokens."""
    target, folder = llama(**TARGET), tmp_path_factory.mktemp("heads")
    dense = next_tokens(target, folder, llama, HEADS)
    with TokenEngine(folder, kv_cache_memory=8 << 20) as engine:
        yield target, folder, dense, ran(engine, False)


def steered(made: Made, overlap: bool = False, **settings: Any) -> tuple[float, list[list[Result]]]:
    """Return the largest difference of log-probabilities, and the texts."""
    target, folder, dense, plain = made
    with opened(folder, "mtp", **settings) as engine:
        stepper: Any = engine.worker._stepper  # type: ignore[attr-defined]
        assert isinstance(stepper.model_drafter, HeadDrafter)
        stepper.__class__ = Steered
        stepper.random = np.random.default_rng(0)
        stepper.texts = [one.prompt + one.tokens for each in plain for one in each]
        session = engine.session(chunk=8, scramble=2, overlap=overlap)
        worst, found = 0.0, list[list[Result]]()
        for prompts in ([FIRST], [[*FIRST[:18], 3]], [OTHER]):
            stepper.steps.clear()
            found.append(session.run(prompts, 12, temperature=1.0))
            worst = max(worst, furthest(target, dense, "mtp", found[-1], stepper.steps)[0])
        stepper.steps.clear()
        joined = engine.session(stagger=1, chunk=5, overlap=overlap)
        found.append(joined.run([OTHER, THIRD, FIRST], 14, temperature=1.0))
        here, count = furthest(target, dense, "mtp", found[-1], stepper.steps)
        decodes = len(stepper.steps)
    assert count > 20 and decodes < 60
    return max(worst, here), found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graph", ["off", "compiled"])
def test_each_layer_drafts_what_dense_torch_gives_whatever_was_accepted(made: Made, graph: str, overlap: bool) -> None:
    worst, found = steered(made, overlap, graph=graph)
    assert worst < TOLERANCE
    assert [[one.tokens for one in each] for each in found] == [[one.tokens for one in each] for each in made[3]]


@pytest.mark.parametrize("make", ["qwen2", "deepseek_v3"])
def test_layers_of_other_architectures_draft_too(make: str, tmp_path: Path) -> None:
    from devices.mlx.tests.test_draft_laws import run

    target = qwen2(num_hidden_layers=4) if make == "qwen2" else deepseek_v3()
    own = (qwen2, "mimo") if make == "qwen2" else (deepseek_v3, "deepseek")
    more = {} if make == "qwen2" else {"first_k_dense_replace": 0}
    dense = next_tokens(target, tmp_path, own[0], HEADS, own[1], **more)
    assert run(tmp_path, "mtp", dense, target) < TOLERANCE


def test_one_draft_token_is_that_of_the_first_layer(made: Made) -> None:
    _, folder, _, plain = made
    with TokenEngine(folder, speculative="mtp", draft_tokens=1, kv_cache_memory=8 << 20) as engine:
        assert type(engine.worker._stepper) is DraftStepper  # type: ignore[attr-defined]
        assert [each[0].tokens for each in ran(engine, True)] == [each[0].tokens for each in plain]


def test_more_tokens_than_layers_are_refused(made: Made) -> None:
    with pytest.raises(ConfigError, match="draft_tokens is 4, and .* has 3 layers that predict one token each"):
        opened(made[1], "mtp", draft_tokens=4)


def rewrites_nothing(patch: pytest.MonkeyPatch) -> None:
    """No entry before a verification is written again."""
    right = HeadDrafter.take_in_verified

    def none(self: Any, rows: Any, cells: Any) -> Any:
        starts, self._starts = self._starts, np.full_like(self._starts, 10**6)
        made = right(self, rows, cells)
        self._starts = starts
        return made

    patch.setattr(HeadDrafter, "take_in_verified", none)


def keeps_inputs_of_one_row_before(patch: pytest.MonkeyPatch) -> None:
    """The kept inputs are those of one row earlier."""
    right = HeadDrafter._keep
    patch.setattr(
        HeadDrafter,
        "_keep",
        lambda self, kept, slots, ids, features, last: right(self, kept, slots, ids, features, last - 1),
    )


def chunks_begin_at_themselves(patch: pytest.MonkeyPatch) -> None:
    """A further chunk does not begin before itself."""
    right = head_drafter._Widened.of
    patch.setattr(
        head_drafter._Widened, "of", lambda lengths, fronts: right(lengths, fronts * 0 if fronts.min() < 2 else fronts)
    )


def tokens_of_the_layer_before(patch: pytest.MonkeyPatch) -> None:
    """Layers after the first read the tokens of the layer before."""
    right = head_drafter._ahead
    patch.setattr(
        head_drafter, "_ahead", lambda ids, known, beyond, depth: right(ids, known, beyond, max(depth - 1, 0))
    )


DEFECTS = (rewrites_nothing, keeps_inputs_of_one_row_before, chunks_begin_at_themselves, tokens_of_the_layer_before)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda each: each.__name__)
def test_a_layer_that_reads_wrongly_shows(made: Made, defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    assert steered(made, graph="off")[0] > 0.02
