"""Draft models in whole engines: draft tokens are drawn from the distribution of dense torch on the
resulting text and transformers' hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from devices.mlx.tests.parity import TokenEngine
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.session import Result
from sglcore.core.errors import ConfigError
from sglcore_mlx.speculative import drafter as drafters
from sglcore_mlx.speculative.draft_stepper import DraftStepper
from sglcore_mlx.speculative.drafter import Begun, PromptRows, Roots, VerifiedRows

pytestmark = pytest.mark.needs("torch")

if find_spec("torch") is not None:
    import torch

    from tests.checkpoints import llama, qwen2, qwen3, qwen3_next, save
    from tests.drafts import AUX_IDS, TARGET, dflash, eagle, eagle3, next_token, with_config
    from tests.latent import deepseek_v3, deepseek_v32

TOKENS = 3
TOLERANCE = 5e-4
KINDS = ("eagle", "eagle3", "mtp", "standalone", "dflash")


class Step(NamedTuple):
    """The drafts after one step: request slots [B], KV slots used [B], log-probabilities [B, k, V],
    draft tokens [B, k]."""

    slots: NDArray[np.int32]
    cells: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    proposals: NDArray[np.int32]


class Recording(DraftStepper):
    """Records the distributions of all draft tokens. It waits for the device."""

    steps: list[Step]

    def _store(self, slots: mx.array, page_table: Any, begun: Any, roots: Any, lengths: mx.array, width: int) -> None:
        own, drawn = self._sampling.drafting, list[mx.array]()

        def recorded(width: int) -> Callable[[mx.array, mx.array], mx.array]:
            draw = own(width)

            def remember(logits: mx.array, positions: mx.array) -> mx.array:
                drawn.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
                return draw(logits, positions)

            return remember

        self._sampling.drafting = recorded
        super()._store(slots, page_table, begun, roots, lengths, width)
        self._sampling.drafting = own
        if drawn:
            count = slots.shape[0]
            found = slots, lengths[:count], mx.stack(drawn, axis=1), self._drafts.proposals[slots]
            self.steps.append(Step(*(np.array(each) for each in found)))


def features_of(target: Any, tokens: Sequence[int], kind: str) -> Any:
    """Return transformers' features of each token, [n, F]."""
    with torch.no_grad():
        found = target.model(torch.tensor([tokens]), output_hidden_states=True)
    if kind not in ("eagle3", "dflash"):
        return found.last_hidden_state[0]
    return torch.cat([found.hidden_states[layer + 1][0] for layer in AUX_IDS], -1)


class DenseStandalone:
    """Draft tokens of a whole model, by a forward from scratch."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def propose(self, following: Sequence[int], features: Any, path: Sequence[int], first: int) -> Any:
        text = [first, *following, *path]
        with torch.no_grad():
            return torch.log_softmax(self.model(torch.tensor([text])).logits[0, len(following) :], -1)


def furthest(target: Any, dense: Any, kind: str, results: Sequence[Result], steps: Sequence[Step]) -> tuple[float, int]:
    """Return the largest difference of log-probabilities over all draft tokens, and their number.
    Steps after the end of a text are discarded, and those at its end of a draft that would write
    the last token. Request i is in slot i + 1 unless it is alone."""
    worst, count, unwritten = 0.0, 0, int(kind == "standalone")
    texts = [result.prompt + result.tokens for result in results]
    features = [features_of(target, text, kind) for text in texts]
    before = dict.fromkeys(range(len(texts)), 0)
    for step in steps:
        for slot, cells, found, proposals in zip(*step, strict=True):
            index = 0 if len(texts) == 1 else int(slot) - 1
            text = texts[index]
            if not before[index] < cells < len(text) - unwritten:
                continue
            before[index] = cells
            given = text[1 : cells + 1], features[index][:cells], proposals[: TOKENS - 1].tolist()
            wanted = dense.propose(*given, *([text[0]] if kind == "standalone" else []))[: len(found)].numpy()
            number = np.isfinite(wanted)
            if (np.isfinite(found) != number).any():
                return np.inf, count
            worst = max(worst, float(np.abs(found[number] - wanted[number]).max()))
            count += len(found)
    return worst, count


Made = dict[str, tuple[Path, Any]]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Made]:
    """A target by transformers, and for each kind a folder with its draft, and that in torch."""
    target, made = llama(**TARGET), {}
    for kind, make in (("eagle", eagle), ("eagle3", eagle3), ("dflash", dflash)):
        folder = save(target, tmp_path_factory.mktemp(kind))
        made[kind] = folder, make(target, folder / "draft")
    folder = tmp_path_factory.mktemp("mtp")
    made["mtp"] = folder, next_token(target, folder, llama)
    folder, small = save(target, tmp_path_factory.mktemp("standalone")), qwen3(num_hidden_layers=2)
    save(small, folder / "draft")
    made["standalone"] = folder, DenseStandalone(small)
    return target, made


def opened(folder: Path, kind: str, **settings: Any) -> TokenEngine:
    """Start an engine that records its drafts."""
    where = {} if kind == "mtp" else {"draft_model": str(folder / "draft")}
    given = {"draft_tokens": TOKENS, "poison": True, "kv_cache_memory": 8 << 20, **where, **settings}
    engine = TokenEngine(folder, speculative=kind, **given)
    worker: Any = engine.worker
    stepper = worker._stepper
    assert type(stepper) is DraftStepper
    worker._stepper.__class__ = Recording
    worker._stepper.steps = []
    return engine


def run(folder: Path, kind: str, dense: Any, target: Any, overlap: bool = False, **settings: Any) -> float:
    """Run a text, one with its prefix, and three at once; return the largest difference."""
    first, other, third = random_prompts(5, (21, 6, 13))
    worst, count = 0.0, 0
    with opened(folder, kind, **settings) as engine:
        worker: Any = engine.worker
        steps: list[Step] = worker._stepper.steps
        session = engine.session(chunk=8, scramble=2, overlap=overlap)
        for prompts in ([first], [[*first[:18], 3]], [other]):
            steps.clear()
            found = session.run(prompts, 10, temperature=1.0)
            assert len(steps) > 2
            furthest_here, here = furthest(target, dense, kind, found, steps)
            worst, count = max(worst, furthest_here), count + here
        steps.clear()
        session = engine.session(stagger=1, overlap=overlap)
        found = session.run([other, third, first], 14, temperature=1.0)
        furthest_here, here = furthest(target, dense, kind, found, steps)
    worst = max(worst, furthest_here)
    assert np.isinf(worst) or (count > 40 and here > 40)
    return worst


@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_drawn_of_what_dense_torch_gives_on_the_text(drafts: Any, kind: str, graph: str) -> None:
    target, made = drafts
    folder, dense = made[kind]
    assert run(folder, kind, dense, target, graph=graph) < TOLERANCE


@pytest.mark.parametrize("kind", ["eagle3", "standalone"])
def test_steps_that_overlap_read_the_same(drafts: Any, kind: str) -> None:
    target, made = drafts
    folder, dense = made[kind]
    assert run(folder, kind, dense, target, overlap=True) < TOLERANCE


def test_an_mtp_layer_by_other_names_is_read_too(tmp_path: Path) -> None:
    target = qwen2(num_hidden_layers=4)
    dense = next_token(target, tmp_path, qwen2, "mimo")
    assert run(tmp_path, "mtp", dense, target) < TOLERANCE


def test_the_mtp_layer_of_a_hybrid_is_read_too(tmp_path: Path) -> None:
    target = qwen3_next()
    dense = next_token(target, tmp_path, qwen3_next, "qwen", layer_types=["full_attention"])
    assert run(tmp_path, "mtp", dense, target, graph="compiled") < TOLERANCE


def test_an_mtp_layer_with_latent_attention_is_read_too(tmp_path: Path) -> None:
    target = deepseek_v3()
    dense = next_token(target, tmp_path, deepseek_v3, first_k_dense_replace=0)
    assert run(tmp_path, "mtp", dense, target, graph="compiled") < TOLERANCE


def test_a_draft_with_an_indexer_is_refused(tmp_path: Path) -> None:
    next_token(deepseek_v32(), tmp_path, deepseek_v32, first_k_dense_replace=0)
    with pytest.raises(ConfigError, match="the draft has an indexer, which this device does not run yet"):
        opened(tmp_path, "mtp")


def test_an_eagle_3_draft_with_the_targets_head_and_normed_output_is_read_too(tmp_path: Path) -> None:
    target = llama(**TARGET)
    folder = save(target, tmp_path)
    dense = eagle3(target, folder / "draft", rows=0, norm_output=True, has_fc_norm=True)
    assert run(folder, "eagle3", dense, target) < TOLERANCE


def other_layers(patch: pytest.MonkeyPatch, draft: Path) -> None:
    """Features come from one layer too late."""
    with_config(draft, eagle_config={"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in AUX_IDS]})


def features_of_the_token_itself(patch: pytest.MonkeyPatch, draft: Path) -> None:
    """A verification runs the tokens of the target, not those after them."""
    own = drafters.FeatureDrafter.take_in_verified

    def shifted(self: Any, rows: VerifiedRows, cells: Any) -> Begun:
        changed = rows.fields["input_ids"].reshape(rows.drawn.shape)
        return own(self, replace(rows, drawn=changed), cells)

    patch.setattr(drafters.FeatureDrafter, "take_in_verified", shifted)


def prompts_without_an_end(patch: pytest.MonkeyPatch, draft: Path) -> None:
    """The last token of a chunk is followed by the first of the batch."""
    own = drafters.FeatureDrafter.take_in_prompts

    def rolled(self: Any, rows: PromptRows, cells: Any) -> Begun:
        rows.following[:] = mx.concatenate([rows.ids[1:], rows.ids[:1]])
        return own(self, rows, cells)

    patch.setattr(drafters.FeatureDrafter, "take_in_prompts", rolled)


def forgets_its_tail(patch: pytest.MonkeyPatch, draft: Path) -> None:
    """A draft token does not see the draft tokens before it."""
    own = drafters.ModelDrafter.step

    def alone(self: Any, *given: Any) -> Any:
        logits, hidden, made = own(self, *given)
        return logits, hidden, [each * 0 for each in made]

    patch.setattr(drafters.ModelDrafter, "step", alone)


def sees_one_entry_more(patch: pytest.MonkeyPatch, draft: Path) -> None:
    """Draft tokens see the entry of a rejected token."""
    own = drafters.ChainDrafter.propose

    def longer(self: Any, pages: Any, begun: Begun, root: Roots, *rest: Any) -> mx.array:
        return own(self, pages, replace(begun, lens=begun.lens + 1), root, *rest)

    patch.setattr(drafters.ChainDrafter, "propose", longer)


DEFECTS = (other_layers, features_of_the_token_itself, prompts_without_an_end, forgets_its_tail, sees_one_entry_more)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda each: each.__name__)
def test_a_draft_that_reads_wrongly_shows(defect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = llama(**TARGET)
    folder = save(target, tmp_path)
    dense = eagle3(target, folder / "draft")
    defect(monkeypatch, folder / "draft")
    assert run(folder, "eagle3", dense, target) > 0.02
