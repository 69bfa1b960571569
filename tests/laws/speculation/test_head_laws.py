"""Multi-layer MTP in whole engines, with one draft token per layer: each is drawn from the
distribution of dense torch on the resulting text, for any number of accepted tokens, and none
changes a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.mtp_drafts import MultiHeadDrafter, Window
from sglcore.runtime.speculative.speculation_choice import choose_speculation
from sglcore.schedule.request import Request
from tests.checkpoints import llama, qwen2
from tests.drafts import TARGET, DenseHeads, next_tokens
from tests.latent import deepseek_v3, deepseek_v32
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.speculation.test_draft_laws import TOLERANCE, features_of
from tests.laws.speculation.test_speculative_laws import CONTEXT, VOCABULARY
from tests.laws.speculation.test_speculative_laws import run as run_texts
from tests.laws.speculation.texts import SAMPLING, Ran, check_same

HEADS, TOKENS = 3, 16
PROMPTS = random_prompts(3, (7, 23, 6, 18))
OTHERS = [[*prompt[: max(3, len(prompt) - 3)], 3, 4] for prompt in PROMPTS]
"""Prompts that share prefixes with PROMPTS."""


CORE = pytest.mark.needs("graphs.native")
"""Independent of the device; runs where the core's own kernels are fastest."""


class Made(NamedTuple):
    """A target, its folder, its MTP layers in dense torch, and the texts of both sets of prompts
    without draft tokens."""

    target: Any
    folder: Path
    dense: DenseHeads
    plain: tuple[Ran, Ran]


class Drawn(NamedTuple):
    """One draft step of a text: the text's index, its KV slots, log-probabilities [tokens, vocab],
    and draft tokens."""

    text: int
    cells: int
    logprobs: Tensor
    proposals: list[int]


class Steered:
    """A drafter that records its distributions, and then puts a random number of correct tokens
    first, so that every number of accepted tokens occurs."""

    def __init__(self, inner: Any, heads: int) -> None:
        self.inner, self._heads = inner, heads
        self.steps: list[Drawn] = []
        self._random = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, texts: list[list[int]], requests: list[Request]) -> None:
        """Use these requests, with these texts as their future results."""
        self.requests, self.texts = requests, texts
        self.steps.clear()

    def advance(self, rows: DraftRows) -> Tensor:
        drawn: list[Tensor] = []
        draw = rows.draw

        def remember(logits: Tensor, depth: int) -> Tensor:
            drawn.append(torch.log_softmax(logits.cpu(), -1))
            return draw(logits, depth)

        rows.draw = remember
        found = self.inner.advance(rows)
        if not drawn:
            return found
        texts, steered = {request.run.slot: index for index, request in enumerate(self.requests)}, found.tolist()
        for row, (slot, cells) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            self.steps.append(Drawn(texts[slot], cells, torch.stack([each[row] for each in drawn]), steered[row]))
            right = self.texts[texts[slot]][cells + 1 :][: min(self._random.integers(self._heads + 1), len(drawn))]
            steered[row] = [*right, *((each + 1) % VOCABULARY for each in steered[row][len(right) :])]
        return torch.tensor(steered, dtype=torch.int32).to(found.device)


def texts(engine: TokenEngine, prompts: list[list[int]], **given: Any) -> Ran:
    """Run all prompts at once, each with other sampling parameters."""
    return run_texts(engine, prompts, TOKENS, SAMPLING[: len(prompts)], **given)


class Watched:
    """A runner that records the paths of its decode batches."""

    def __init__(self, inner: Any, paths: set[str]) -> None:
        self.inner, self._paths = inner, paths

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, str]:
        hidden, path = self.inner.forward(batch)
        if batch.forward_mode.is_decode:
            self._paths.add(path.partition(":")[0])
        return hidden, path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    target = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    folder = tmp_path_factory.mktemp("heads")
    dense = next_tokens(target, folder, llama, HEADS)
    engine = TokenEngine(folder, graph="off")
    try:
        return Made(target, folder, dense, (texts(engine, PROMPTS), texts(engine, OTHERS)))
    finally:
        engine.worker.close()


def furthest(made: Made, texts: list[list[int]], steps: Sequence[Drawn], changes: bool = False) -> float:
    """Return the largest difference of log-probabilities. Ignores steps after the end of a text,
    which are discarded."""
    features, before, worst = [features_of(made.target, text, "mtp") for text in texts], [0] * len(texts), 0.0
    accepts = set()
    for text, cells, logprobs, proposals in steps:
        if not before[text] < cells < len(texts[text]):
            continue
        accepts |= {cells - before[text] - 1} if before[text] else set()
        before[text] = cells
        known = texts[text][1 : cells + 1]
        wanted = made.dense.propose(known, features[text][:cells], proposals[: len(logprobs) - 1])
        worst = max(worst, float((logprobs - wanted).abs().max()))
    assert min(before) and (changes or accepts == set(range(len(made.dense.heads) + 1)))
    return worst


def difference(made: Made, heads: int = HEADS, retracts: bool = False, changes: bool = False, **settings: Any) -> float:
    """Run texts with one engine, some with shared prefixes; each must equal the text without draft
    tokens. Returns the largest difference."""
    given = {"draft_tokens": heads, "max_batch_tokens": 16, "scramble_pages": 2, "graph_buckets": (1, 2, 5), **settings}
    engine = TokenEngine(made.folder, speculative="mtp", **given)
    worker: Any = engine.worker
    assert isinstance(worker.drafter, MultiHeadDrafter)
    paths = [set[str]() for _ in range(heads)]
    watched: Any = worker.drafter
    watched.runners = tuple(map(Watched, watched.runners, paths))
    worker.drafter = steered = Steered(worker.drafter, heads)
    worst = 0.0
    try:
        for prompts, plain in zip((PROMPTS, OTHERS), made.plain, strict=True):
            whole = [prompt + tokens for prompt, tokens in zip(prompts, plain.tokens, strict=True)]
            found = texts(engine, prompts, prepare=partial(steered.begin, whole))
            check_same(found, plain)
            worst = max(worst, furthest(made, whole, steered.steps, changes))
        stats = engine.scheduler.stats()
        evidence = worker.length._evidence.values()
        assert set().union(*(each.seconds for each in evidence)) == (set(worker.length.lengths) if changes else set())
        assert stats.hit_tokens > 0 and (stats.retractions > 0) == retracts
        assert all(bool(each - {"eager"}) == (settings["graph"] != "off") for each in paths), paths
    finally:
        worker.close()
    return worst


def test_proposals_are_drawn_of_what_dense_torch_gives_and_change_no_text(made: Made, graph: str) -> None:
    assert difference(made, graph=graph) < TOLERANCE


@CORE
@pytest.mark.parametrize(
    ("chunk", "page_size"), [(1, 1), (2, 4), (3, 16), (4, 1), (5, 4), (6, 16), (7, 4)], ids=lambda each: str(each)
)
def test_neither_chunks_nor_pages_change_what_they_are_drawn_of(made: Made, chunk: int, page_size: int) -> None:
    given = {"max_batch_tokens": chunk, "page_size": page_size, "overlap": chunk % 2 == 0}
    assert difference(made, graph="off", poison=True, **given) < TOLERANCE


@CORE
@pytest.mark.parametrize("overlap", [False, True])
def test_a_cache_that_holds_no_two_texts_changes_nothing(made: Made, overlap: bool) -> None:
    given = {"kv_cache_memory": 128 << 10, "max_model_len": 48, "overlap": overlap}
    assert difference(made, retracts=True, graph="off", **given) < TOLERANCE


@CORE
def test_the_host_tells_the_length_of_every_row_where_steps_do_not_overlap(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0

    class Checked(MultiHeadDrafter):
        def ahead(self, window: Window, depth: int) -> Tensor:
            nonlocal compared
            batch, host = window.batch, window.batch.seq_lens_cpu
            assert host is not None and host.dtype == np.int32 and host.min() > 0
            is_there = batch.req_pool_indices.numpy() > 0
            np.testing.assert_array_equal(host[is_there], batch.seq_lens.numpy()[is_there])
            compared += int(is_there.sum())
            return super().ahead(window, depth)

    monkeypatch.setattr("sglcore.runtime.speculative.kinds.mtp_steps.MultiHeadDrafter", Checked)
    assert difference(made, graph="off", overlap=False, max_batch_tokens=5) < TOLERANCE
    assert compared > 100


def leaves_proposals(drafter: MultiHeadDrafter, slots: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Mutant: writes no KV slot again."""
    owners, positions = MultiHeadDrafter.front(drafter, slots, cells)
    return owners * 0, positions * 0


def writes_before_its_beginning(drafter: MultiHeadDrafter, slots: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Mutant: writes over cached KV slots with data kept for another request."""
    before = drafter._starts.clone()
    drafter._starts.zero_()
    found = MultiHeadDrafter.front(drafter, slots, cells)
    drafter._starts.copy_(before)
    return found


def turns_one_place_too_far(drafter: MultiHeadDrafter, window: Window, depth: int) -> Tensor:
    return MultiHeadDrafter.ahead(drafter, window, depth + (depth > 0))


def expects_too_early(drafter: MultiHeadDrafter, window: Window, depth: int) -> Tensor:
    """Mutant: puts the first draft token in the place of the last known token."""
    return MultiHeadDrafter.ahead(drafter, window._replace(known=window.known - 1), depth)


def shifted_features(drafter: MultiHeadDrafter, rows: DraftRows, features: Tensor) -> Window:
    window = MultiHeadDrafter.verified(drafter, rows, features)
    return window._replace(features=window.features.roll(1, 0))


def keeps_for_another(drafter: MultiHeadDrafter, slots: Tensor, ids: Tensor, features: Tensor) -> None:
    """Mutant: stores the kept features of a step in another row's request slot."""
    MultiHeadDrafter.keep(drafter, slots.roll(1), ids, features)


def runs_no_more_than_wanted(drafter: MultiHeadDrafter, rows: DraftRows, features: Tensor) -> Iterator[Tensor]:
    """Mutant: skips the KV slots of layers without a wanted draft token."""
    return islice(MultiHeadDrafter.run_verified(drafter, rows, features), rows.wanted)


@CORE
@pytest.mark.parametrize(
    ("part", "defect"),
    [
        ("front", leaves_proposals),
        ("front", writes_before_its_beginning),
        ("ahead", turns_one_place_too_far),
        ("ahead", expects_too_early),
        ("verified", shifted_features),
        ("keep", keeps_for_another),
        ("run_verified", runs_no_more_than_wanted),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_defect_shows(made: Made, part: str, defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Defective(MultiHeadDrafter):
        pass

    setattr(Defective, part, defect)
    monkeypatch.setattr("sglcore.runtime.speculative.kinds.mtp_steps.MultiHeadDrafter", Defective)
    changing: Any = {"draft_tokens": None, "changes": True} if defect is runs_no_more_than_wanted else {}
    assert difference(made, graph="off", **changing) > 0.01


@CORE
@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_many_layers_propose_as_tokens_were_asked_for(made: Made, count: int) -> None:
    engine = TokenEngine(made.folder, speculative="mtp", draft_tokens=count, graph="off")
    drafter = engine.worker.drafter  # type: ignore[attr-defined]
    assert (drafter.tokens, drafter.lookahead) == (count, count)
    assert isinstance(drafter, MultiHeadDrafter) == (count > 1)
    check_same(texts(engine, PROMPTS), made.plain[0])
    engine.worker.close()


@CORE
def test_the_first_layer_alone_grows_trees(made: Made) -> None:
    engine = TokenEngine(made.folder, speculative="mtp", draft_width=2, graph="off")
    assert not isinstance(engine.worker.drafter, MultiHeadDrafter)  # type: ignore[attr-defined]
    check_same(texts(engine, PROMPTS), made.plain[0])
    engine.worker.close()


@CORE
def test_numbers_that_change_change_nothing(made: Made) -> None:
    """Includes steps without draft tokens. After them, KV slots hold tokens that were never
    drafted."""
    assert difference(made, graph="off", draft_tokens=None, changes=True) < TOLERANCE


@CORE
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_what_is_greedy_is_the_same_by_rejection(made: Made, rule: str) -> None:
    found = []
    for settings in ({}, {"speculative": "mtp", "speculative_verify": rule, "draft_tokens": HEADS}):
        engine = TokenEngine(made.folder, graph="off", **settings)
        found.append(run_texts(engine, PROMPTS, TOKENS, [{"temperature": 0.0}] * len(PROMPTS)))
        engine.worker.close()
    check_same(found[1], found[0])


@CORE
@pytest.mark.parametrize("make", [deepseek_v3, deepseek_v32])
def test_layers_that_keep_rows_propose_too(tmp_path: Path, make: Any) -> None:
    target = make()
    dense = next_tokens(target, tmp_path, make, HEADS, first_k_dense_replace=0)
    engine = TokenEngine(tmp_path, graph="off", attention_backend="latent")
    plain = texts(engine, PROMPTS), texts(engine, OTHERS)
    engine.worker.close()
    rows = Made(target, tmp_path, dense, plain)
    assert difference(rows, graph="off", attention_backend="latent") < TOLERANCE


@CORE
def test_layers_of_another_layout_propose_too(tmp_path: Path) -> None:
    target = qwen2(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    dense = next_tokens(target, tmp_path, qwen2, 2, "mimo")
    engine = TokenEngine(tmp_path, graph="off")
    plain = texts(engine, PROMPTS), texts(engine, OTHERS)
    engine.worker.close()
    assert difference(Made(target, tmp_path, dense, plain), 2, graph="off") < TOLERANCE


@CORE
def test_more_proposals_than_there_are_layers_are_refused(made: Made) -> None:
    with pytest.raises(ConfigError, match="draft_tokens is 4, and .* has 3 layers .*; --draft-tokens 3, or fewer"):
        TokenEngine(made.folder, speculative="mtp", draft_tokens=4)


@CORE
@pytest.mark.parametrize(("tokens", "lengths"), [(None, (0, 1, 3)), (2, (2,)), (1, (1,))])
def test_the_ledger_says_how_many_layers_propose(made: Made, tokens: int | None, lengths: tuple[int, ...]) -> None:
    config, ledger = EngineConfig(model=str(made.folder), speculative="mtp", draft_tokens=tokens), DecisionLedger()
    model: Any = SimpleNamespace(config=SimpleNamespace(is_encoder=False), state_layers=(), reads_history=False)
    draft = SimpleNamespace(
        model=SimpleNamespace(state_layers=(), attention_layers=()), aux_layers=(), heads=lengths[-1]
    )
    found = choose_speculation(config, model, made.folder, ledger, lambda *_: draft)
    assert found is not None and (found.lengths, found.heads) == (lengths, lengths[-1])
    assert ("draft tokens" in {row.topic for row in ledger.rows}) == (lengths[-1] > 1)
    (row,) = [row for row in ledger.rows if row.topic == "speculative"]
    assert row.effective == found.summary
