"""Draft models in whole engines: draft tokens are drawn from the distribution of dense torch on the
resulting text and transformers' hidden states, through chunks, prefix hits, graphs and any number
of accepted tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.engine import speed_trial
from sglcore.models.drafts.deepseek_v4_nextn import DeepseekV4NextN
from sglcore.runtime.overlap import micro_batches
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.speculation_choice import choose_speculation
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from tests.checkpoints import llama, qwen3_next, save
from tests.deepseek_v4 import DenseStreams, deepseek_v4, streams_of, with_published_names
from tests.drafts import AUX_IDS, TARGET, DenseDraft, dflash, eagle, eagle3, next_token, with_config
from tests.latent import deepseek_v3, deepseek_v32
from tests.laws.engine import TokenEngine, random_prompts

TOKENS = 3
TOLERANCE = 5e-4


class Step(NamedTuple):
    """One step of a text: `cells` KV slots used, `limit` of its pages, log-probabilities [tokens,
    vocab] of the draft tokens, and the draft tokens."""

    cells: int
    limit: int
    logprobs: Tensor
    proposals: list[int]


class Recording:
    """A drafter that records its distributions and tokens; for one text at a time."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.steps: list[Step] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def advance(self, rows: DraftRows) -> Tensor:
        drawn: list[Tensor] = []
        draw = rows.draw

        def remember(logits: Tensor, depth: int) -> Tensor:
            drawn.append(torch.log_softmax(logits[0].cpu(), -1))
            return draw(logits, depth)

        rows.draw = remember
        found = self.inner.advance(rows)
        if drawn:
            cells, limit = int(rows.lengths[0]), int(rows.limits[0])
            self.steps.append(Step(cells, limit, torch.stack(drawn), found[0].tolist()))
        return found


@torch.no_grad()
def features_of(target: Any, tokens: Sequence[int], kind: str) -> Tensor:
    """Return transformers' features of each token, [n, F]: after the last norm, after the layers
    that the draft names, or all streams after the last layer."""
    if target.config.model_type == "deepseek_v4":
        return streams_of(target, tokens)
    found = target.model(torch.tensor([tokens]), output_hidden_states=True)
    if kind not in ("eagle3", "dflash"):
        return found.last_hidden_state[0]
    return torch.cat([found.hidden_states[layer + 1][0] for layer in AUX_IDS], -1)


def furthest(
    target: Any, dense: DenseDraft | DenseStreams, kind: str, tokens: list[int], steps: Sequence[Step]
) -> float:
    """Return the largest difference of log-probabilities, over all draft tokens with KV slots.
    Ignores steps after the end of a text, which are discarded."""
    features, worst, before = features_of(target, tokens, kind), 0.0, 0
    for cells, limit, logprobs, proposals in steps:
        if not before < cells < len(tokens):
            continue
        before = cells
        within = min(TOKENS, max(limit - cells + 1, 1))
        wanted = dense.propose(tokens[1 : cells + 1], features[:cells], proposals[: within - 1])
        if not torch.equal(logprobs[:within].isinf(), wanted.isinf()):
            return torch.inf
        worst = max(worst, float((logprobs[:within] - wanted).nan_to_num().abs().max()))
    return worst


def run(folder: Path, kind: str, dense: DenseDraft | DenseStreams, target: Any, **settings: Any) -> float:
    """Run three texts with a new engine, the second with the prefix of the first; returns the
    largest difference."""
    where = {} if kind == "mtp" else {"draft_model": str(folder / "draft")}
    given = {"draft_tokens": TOKENS, "max_batch_tokens": 8, "scramble_pages": 2, **where, **settings}
    engine = TokenEngine(folder, speculative=kind, **given)
    assert isinstance(engine.worker, SpeculativeWorker)
    recording: Any = Recording(engine.worker.drafter)
    engine.worker.drafter = recording
    first, other = random_prompts(5, [21, 6])
    worst = 0.0
    for prompt in (first, [*first[:18], 3], other):
        recording.steps.clear()
        (result,) = engine.run([prompt], 10, temperature=1.0)
        assert len(recording.steps) > 2
        worst = max(worst, furthest(target, dense, kind, prompt + result.tokens, recording.steps))
    assert ("eager:halves" in engine.paths) == ("two_batch_overlap" in settings)
    engine.worker.close()
    return worst


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, tuple[Path, DenseDraft]]]:
    """A target by transformers, and for each kind a folder with its draft."""
    target, made = llama(**TARGET), {}
    for kind, make in (("eagle", eagle), ("eagle3", eagle3), ("dflash", dflash)):
        folder = save(target, tmp_path_factory.mktemp(kind))
        made[kind] = folder, make(target, folder / "draft")
    folder = tmp_path_factory.mktemp("mtp")
    made["mtp"] = folder, next_token(target, folder, llama)
    return target, made


def texts(folder: Path, speculative: str, proposes: bool) -> list[list[int]]:
    """Return the texts of a start that keeps its drafter, or does not."""
    engine = TokenEngine(folder, speculative=speculative, max_requests=4)
    assert bool(engine.scheduler.limits.draft_tokens) == proposes
    found = [result.tokens for result in engine.run(random_prompts(5, [21, 6]), 10, temperature=1.0)]
    engine.worker.close()
    return found


@pytest.mark.needs("device")
@pytest.mark.parametrize("margin", [0.0, 1e9])
def test_a_draft_that_is_tried_leaves_no_trace_in_a_text(
    drafts: Any, margin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_trial, "MARGIN", margin)
    folder = drafts[1]["eagle"][0]
    assert texts(folder, "auto", not margin) == texts(folder, "off", False)


@pytest.mark.needs("device")
def test_schedulers_whose_compositions_meet_take_each_others_sampling(
    drafts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal composition numbers, a worker reuses sampling state of other requests, or of
    another number of requests."""
    monkeypatch.setattr(speed_trial, "MARGIN", 0.0)
    monkeypatch.setattr(speed_trial, "STRIDE", 0)
    folder = drafts[1]["eagle"][0]
    with pytest.raises((AssertionError, RuntimeError)):
        assert texts(folder, "auto", True) == texts(folder, "off", False)


@pytest.mark.needs("device")
@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_proposals_are_drawn_of_what_dense_torch_gives_on_the_text(drafts, kind: str) -> None:
    target, made = drafts
    folder, dense = made[kind]
    # The longest text uses all existing pages.
    assert run(folder, kind, dense, target, graph="off", max_requests=1, max_model_len=32) < TOLERANCE


@pytest.mark.needs("device")
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_what_drafts_read_of_prompts_in_two_halves_is_what_they_read_of_the_whole(drafts, kind: str) -> None:
    target, made = drafts
    folder, dense = made[kind]
    assert run(folder, kind, dense, target, graph="off", two_batch_overlap="on") < TOLERANCE


@pytest.mark.needs("device")
def test_halves_whose_features_are_put_together_wrongly_show(drafts, monkeypatch: pytest.MonkeyPatch) -> None:
    target, made = drafts
    folder, dense = made["eagle3"]
    own = micro_batches.take_turns
    monkeypatch.setattr(micro_batches, "take_turns", lambda *given: own(*given)[::-1])
    assert run(folder, "eagle3", dense, target, graph="off", two_batch_overlap="on") > 0.1


@pytest.mark.needs("device")
@pytest.mark.parametrize("make", [deepseek_v3, deepseek_v32])
def test_proposals_of_a_layer_that_keeps_rows_are_too(tmp_path: Path, make: Any) -> None:
    target = make()
    dense = next_token(target, tmp_path, make, first_k_dense_replace=0)
    given = {"graph": "off", "attention_backend": "latent"}
    assert run(tmp_path, "mtp", dense, target, **given) < TOLERANCE


STREAMS: Mapping[str, Any] = MappingProxyType({"attention_backend": "compressed", "page_size": 16})


@pytest.mark.needs("graphs.native")
@pytest.mark.parametrize("graph", ["off", "native"])
def test_proposals_of_a_layer_that_reads_streams_are_too(tmp_path: Path, graph: str) -> None:
    target = deepseek_v4()
    folder = with_published_names(target, tmp_path)
    assert run(folder, "mtp", DenseStreams(folder), target, graph=graph, **STREAMS) < TOLERANCE


@pytest.mark.needs("graphs.native")
def test_streams_that_are_read_a_layer_early_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, init = deepseek_v4(), DeepseekV4NextN.__init__

    def early(draft: Any, build: Any) -> None:
        init(draft, build)
        draft.aux_layers = (draft.aux_layers[0] - 1,)

    monkeypatch.setattr(DeepseekV4NextN, "__init__", early)
    folder = with_published_names(target, tmp_path)
    assert run(folder, "mtp", DenseStreams(folder), target, graph="off", **STREAMS) > 0.1


@pytest.mark.needs("graphs.native")
@pytest.mark.parametrize(
    ("make", "kept"), [(deepseek_v4, "its last tokens in rings"), (qwen3_next, "a state of each request")]
)
def test_a_draft_that_keeps_what_its_proposals_would_spoil_is_refused(tmp_path: Path, make: Any, kept: str) -> None:
    draft = make()
    folder = save(llama(vocab_size=draft.config.vocab_size), tmp_path)
    save(draft, folder / "draft")
    with pytest.raises(ConfigError, match=f"the draft keeps {kept}, .*; use another draft"):
        TokenEngine(folder, speculative="standalone", draft_model=str(folder / "draft"), page_size=None)


def test_a_model_that_draws_none_verifies_nothing(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(is_encoder=True), state_layers=(), reads_history=False)
    with pytest.raises(ConfigError, match="speculative is 'ngram', and this model embeds"):
        choose_speculation(EngineConfig(speculative="ngram"), model, tmp_path, DecisionLedger(), lambda *_: None)


def test_proposals_of_several_layers_are_too_by_every_graph(drafts, graph: str) -> None:
    target, made = drafts
    folder, dense = made["eagle3"]
    assert run(folder, "eagle3", dense, target, graph=graph) < TOLERANCE


def other_layers(draft: Path) -> None:
    """Mutant: features come from one layer too late."""
    ids = [layer + 1 for layer in AUX_IDS]
    with_config(draft, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})


def absolute_ids(draft: Path) -> None:
    """Mutant: stores absolute ids where the loader expects offsets to the target's ids."""
    file = draft / "model.safetensors"
    stored = load_file(file)
    save_file({**stored, "d2t": stored["d2t"] - torch.arange(len(stored["d2t"]))}, file)


@pytest.mark.needs("device")
@pytest.mark.parametrize("defect", [other_layers, absolute_ids], ids=lambda each: each.__name__)
def test_a_draft_that_is_read_wrongly_shows(drafts, defect: Any, tmp_path: Path) -> None:
    target, _ = drafts
    save(target, tmp_path)
    dense = eagle3(target, tmp_path / "draft")
    defect(tmp_path / "draft")
    assert run(tmp_path, "eagle3", dense, target, graph="off") > 0.1
