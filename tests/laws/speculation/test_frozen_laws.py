"""Drafts without their own KV cache in whole engines: draft tokens are drawn from transformers'
layers over the target's cache, change no text, and write to no KV slot."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sglcore.checkpoint.frozen_draft_config import FrozenCells
from sglcore.core.errors import ConfigError
from sglcore.layers.frozen_draft import FrozenAttention
from sglcore.models.drafts.draft_config import kind_of, offered_head
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.forward_context import forward_context, get_forward_context
from sglcore.runtime.memory.read_only import ReadOnlyPool, ReadOnlyPoolError
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.frozen_drafts import FrozenDrafter
from tests.checkpoints import gemma3, llama, save
from tests.drafts import TARGET, with_config
from tests.frozen_drafts import DenseFrozen, frozen
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.speculation.test_draft_laws import TOLERANCE, Recording, Step
from tests.laws.speculation.test_speculative_laws import CONTEXT, VOCABULARY
from tests.laws.speculation.test_speculative_laws import run as run_texts
from tests.laws.speculation.texts import check_same
from tests.models.transformers.test_transformers_models import sizes_of
from tests.models.transformers_cases import tiny_model

TOKENS = 3
FULL = ("full_attention", "full_attention")
Patch = pytest.MonkeyPatch


class Made(NamedTuple):
    """A target, its folder, and a draft in it."""

    target: Any
    folder: Path
    dense: DenseFrozen


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    target = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    folder = save(target, tmp_path_factory.mktemp("frozen"))
    return Made(target, folder, frozen(target, folder / "draft", FULL, 12, 12))


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A draft with its vocabulary in groups, which computes the logits of a few chosen groups."""
    target = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=100)
    folder = save(target, tmp_path_factory.mktemp("grouped"))
    return Made(target, folder, frozen(target, folder / "draft", FULL, 12, 12, groups=20))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A target with full-attention and sliding-window layers; the last layer has a window."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    target = gemma3(num_hidden_layers=4, layer_types=kinds, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    folder, size = save(target, tmp_path_factory.mktemp("gemma")), target.config.head_dim
    dense = frozen(target, folder / "draft", ("sliding_attention", "sliding_attention", "full_attention"), size, size)
    return Made(target, folder, dense)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Gemma 4, for which such drafts are made, by transformers' class; its own layers share keys
    and values too."""
    sizes = {**sizes_of("gemma4_text"), "max_position_embeddings": CONTEXT, "vocab_size": VOCABULARY}
    target = tiny_model("gemma4_text", sizes)
    folder, size = save(target, tmp_path_factory.mktemp("gemma4")), target.config.head_dim
    dense = frozen(target, folder / "draft", ("sliding_attention", "full_attention", "full_attention"), size, 16)
    return Made(target, folder, dense)


def cells_of(worker: Any) -> list[Tensor]:
    """Return a copy of the target's KV pool."""
    pool = worker.runner.attn_backend.token_to_kv_pool
    return [each.clone() for layer in range(pool.num_layers) for each in pool.kv(layer)]


class Watching(Recording):
    """Also compares the target's KV pool before and after each draft step."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker.drafter)
        self.worker, self.writes = worker, 0

    def advance(self, rows: DraftRows) -> Tensor:
        before = cells_of(self.worker)
        found = super().advance(rows)
        same = [torch.equal(one, other) for one, other in zip(before, cells_of(self.worker), strict=True)]
        self.writes += not all(same)
        return found


def make(made: Made, **settings: Any) -> TokenEngine:
    given = {"draft_tokens": TOKENS, "max_batch_tokens": 8, "scramble_pages": 2, "graph": "off", **settings}
    return TokenEngine(made.folder, speculative="frozen-mtp", **given)


def furthest(dense: DenseFrozen, tokens: list[int], steps: Sequence[Step]) -> float:
    """Return the largest difference of log-probabilities. Ignores steps after the end of a text,
    which are discarded."""
    worst, compared, before = 0.0, 0, 0
    for cells, _, logprobs, proposals in steps:
        if before < cells < len(tokens):
            before = cells
            wanted = dense.propose(tokens[:cells], tokens[cells], proposals[: TOKENS - 1])
            if not torch.equal(logprobs.isinf(), wanted.isinf()):
                return torch.inf
            worst, compared = max(worst, float((logprobs - wanted).nan_to_num().abs().max())), compared + 1
    assert compared > 2
    return worst


def difference(made: Made, **settings: Any) -> float:
    """Run three texts with one engine, the second with the prefix of the first. Returns the largest
    difference, or inf if a draft wrote to the target's KV slots."""
    engine = make(made, **settings)
    worker: Any = engine.worker
    watching: Any = Watching(worker)
    worker.drafter = watching
    first, other = random_prompts(5, [21, 6])
    worst = 0.0
    try:
        for prompt in (first, [*first[:18], 3], other):
            watching.steps.clear()
            (result,) = engine.run([prompt], 16, temperature=1.0)
            worst = max(worst, furthest(made.dense, prompt + result.tokens, watching.steps))
        assert engine.scheduler.stats().hit_tokens > 0
    finally:
        engine.worker.close()
    return torch.inf if watching.writes else worst


def test_proposals_are_drawn_of_what_transformers_layers_give(made: Made, graph: str) -> None:
    assert difference(made, graph=graph, shadow=0 if graph == "off" else 3) < TOLERANCE


@pytest.mark.needs("device")
def test_layers_of_each_kind_read_the_last_of_the_targets(gemma: Made) -> None:
    assert difference(gemma) < TOLERANCE


@pytest.mark.needs("device")
def test_tokens_of_groups_that_are_not_chosen_are_not_proposed(grouped: Made) -> None:
    assert difference(grouped) < TOLERANCE


@pytest.mark.needs("device")
def test_a_group_more_or_less_shows(grouped: Made, tmp_path: Path) -> None:
    shutil.copytree(grouped.folder / "draft", tmp_path / "draft")
    with_config(tmp_path / "draft", centroid_intermediate_top_k=9)
    assert difference(grouped, draft_model=str(tmp_path / "draft")) == torch.inf


@pytest.mark.needs("device")
def test_layers_read_what_the_targets_own_layers_share(gemma4: Made) -> None:
    assert difference(gemma4, model_impl="transformers") < TOLERANCE


def check_texts(made: Made, cells: str = "auto", **settings: Any) -> None:
    """Compare texts with and without draft tokens: greedy, at several temperatures, and with
    penalties."""
    found = []
    both: tuple[dict[str, Any], ...] = (
        {"graph": "off"},
        {"speculative": "frozen-mtp", "draft_tokens": TOKENS, **settings},
    )
    for asked in both:
        engine = TokenEngine(made.folder, kv_cache_dtype=cells, **asked)
        found.append(run_texts(engine))
        engine.worker.close()
    check_same(found[1], found[0])


def test_proposals_change_no_text(made: Made, graph: str) -> None:
    check_texts(made, graph=graph)


@pytest.mark.needs("device")
def test_proposals_of_steps_that_wait_for_each_other_change_none(made: Made) -> None:
    check_texts(made, graph="off", overlap=False)


@pytest.mark.needs("graphs.native")
def test_proposals_from_cells_of_eight_bits_change_none(made: Made) -> None:
    """Attention with queries only needs no kernel that stores 8-bit keys and values."""
    check_texts(made, "int8", graph="native")


def test_a_draft_is_known_by_its_tensors_and_found_beside_the_model(made: Made) -> None:
    assert kind_of(made.folder / "draft") == offered_head(made.folder) == "frozen-mtp"


@pytest.mark.needs("device")
def test_a_draft_takes_no_memory_of_cells(made: Made) -> None:
    engine, plain = make(made), TokenEngine(made.folder, graph="off")
    drafter: Any = engine.worker.drafter  # type: ignore[attr-defined]
    pool, own = drafter.runner.attn_backend.token_to_kv_pool, engine.worker.runner.attn_backend.token_to_kv_pool
    assert isinstance(pool, ReadOnlyPool) and pool.kv(2) is own.kv(2)
    assert engine.worker.limits.num_pages == plain.worker.limits.num_pages
    engine.worker.close()
    plain.worker.close()


def stores(layer: FrozenAttention, q: Tensor, batch: ForwardBatch) -> Tensor:
    rows = q.new_ones(len(q), layer.layer.num_kv_heads * layer.layer.head_dim)
    return layer.layer(q, rows, rows)


def asks_for_cells(layer: FrozenAttention, q: Tensor, batch: ForwardBatch) -> Tensor:
    cells = layer.layer.cells()
    assert cells is not None
    cells[0][cells[2]] = 1
    return layer.layer(q, None, None)


class Inside:
    """A drafter that runs inside the target's forward context, and checks that the context is
    restored."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.inner = worker, worker.drafter
        self.seen: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def advance(self, rows: DraftRows) -> Tensor:
        outer = self.worker.runner.context(rows.batch)
        with forward_context(outer):
            try:
                return self.inner.advance(rows)
            finally:
                self.seen.append(get_forward_context() is outer)


@pytest.mark.needs("device")
@pytest.mark.parametrize("defect", [stores, asks_for_cells])
def test_a_draft_that_would_write_is_stopped_and_leaves_the_targets_context(
    made: Made, defect: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(FrozenAttention, "__call__", defect)
    engine = make(made)
    worker: Any = engine.worker
    worker.drafter = inside = Inside(worker)
    with pytest.raises(ReadOnlyPoolError, match="in KV slots of layer 5 of another"):
        engine.run(random_prompts(5, [7]), 4)
    assert inside.seen == [True]
    engine.worker.close()


@pytest.mark.needs("device")
def test_cells_that_are_not_read_only_show_who_writes(made: Made, monkeypatch: Patch) -> None:
    monkeypatch.setattr(FrozenAttention, "__call__", stores)
    monkeypatch.setattr("sglcore.runtime.speculative.speculation_bring_up.ReadOnlyPool", lambda pool: pool)
    assert difference(made) == torch.inf


def count_plans(engine: TokenEngine, monkeypatch: Patch) -> list[int]:
    """Record the token count of each plan of the draft's backend from now on."""
    backend, plans = engine.worker.drafter.runner.attn_backend, list[int]()  # type: ignore[attr-defined]
    own = type(backend).plan

    def counted(planner: Any, batch: ForwardBatch) -> Any:
        if planner is backend:
            plans.append(batch.num_tokens)
        return own(planner, batch)

    monkeypatch.setattr(type(backend), "plan", counted)
    return plans


@pytest.mark.needs("device")
def test_one_plan_serves_all_forwards_of_a_step(made: Made, monkeypatch: Patch) -> None:
    engine = make(made)
    plans = count_plans(engine, monkeypatch)
    worker: Any = engine.worker
    worker.drafter = recording = Recording(worker.drafter)
    engine.run(random_prompts(5, [7]), 10)
    assert len(recording.steps) > 2 and len(plans) == len(recording.steps)
    engine.worker.close()


def keeps_its_plan(drafter: Any, batch: ForwardBatch, steps: int) -> ForwardBatch:
    if batch.turn == (1, 0):
        drafter.kept = FrozenDrafter.planned(drafter, batch, steps).plan_record
    return replace(batch, plan_record=drafter.kept)


def plans_for_fewer(drafter: Any, batch: ForwardBatch, steps: int) -> ForwardBatch:
    return FrozenDrafter.planned(drafter, batch, steps - 1)


def defective(monkeypatch: Patch, part: str, defect: Callable[..., Any]) -> None:
    class Defective(FrozenDrafter):
        pass

    setattr(Defective, part, defect)
    monkeypatch.setattr("sglcore.runtime.speculative.kinds.frozen_mtp_steps.FrozenDrafter", Defective)


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    ("defect", "told"),
    [
        (keeps_its_plan, "planned for the lengths of epoch 1, the batch has the lengths of 2"),
        (plans_for_fewer, "planned for 2 forwards, this is one more"),
    ],
)
def test_a_plan_of_other_lengths_or_for_fewer_forwards_is_refused(
    made: Made, defect: Any, told: str, monkeypatch: Patch
) -> None:
    defective(monkeypatch, "planned", defect)
    engine = make(made)
    with pytest.raises(StalePlanError, match=told):
        engine.run(random_prompts(5, [7]), 10)
    engine.worker.close()


def moves_on(drafter: Any, batch: ForwardBatch, ids: Tensor, hidden: Tensor) -> ForwardBatch:
    found = FrozenDrafter.following(drafter, batch, ids, hidden)
    return replace(found, positions=found.positions + 1)


def sees_more(drafter: Any, batch: ForwardBatch, ids: Tensor, hidden: Tensor) -> ForwardBatch:
    """Plan again, because some plans contain the lengths."""
    found = FrozenDrafter.following(drafter, batch, ids, hidden)
    more = None if found.seq_lens_cpu is None else found.seq_lens_cpu + 1
    return replace(found, seq_lens=found.seq_lens + 1, seq_lens_cpu=more, plan_record=None)


def keeps_the_targets_feature(drafter: Any, batch: ForwardBatch, ids: Tensor, hidden: Tensor) -> ForwardBatch:
    return replace(FrozenDrafter.following(drafter, batch, ids, hidden), features=batch.features)


def stands_at_the_root(drafter: Any, rows: DraftRows) -> ForwardBatch:
    found = FrozenDrafter.first(drafter, rows)
    return replace(found, positions=found.positions + 1, seq_lens=found.seq_lens + 1)


def reads_the_row_before(drafter: Any, rows: DraftRows) -> ForwardBatch:
    assert rows.features is not None
    before = rows.features.index_select(0, (rows.select - 1).clamp(min=0))
    return replace(FrozenDrafter.first(drafter, rows), features=before)


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    ("part", "defect"),
    [
        ("following", moves_on),
        ("following", sees_more),
        ("following", keeps_the_targets_feature),
        ("first", stands_at_the_root),
        ("first", reads_the_row_before),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_defect_of_a_draft_that_keeps_nothing_shows(made: Made, part: str, defect: Any, monkeypatch: Patch) -> None:
    defective(monkeypatch, part, defect)
    assert difference(made) > 0.01


def window_of_one_more(cells: FrozenCells) -> FrozenCells:
    return cells._replace(window=cells.window and cells.window + 1)


def first_of_its_kind(cells: FrozenCells) -> FrozenCells:
    return cells._replace(layer_id=cells.layer_id % 2)


@pytest.mark.needs("device")
@pytest.mark.parametrize("defect", [window_of_one_more, first_of_its_kind], ids=lambda each: each.__name__)
def test_another_window_or_layer_of_the_target_shows(gemma: Made, defect: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        "sglcore.models.drafts.gemma4_assistant.FrozenCells", lambda *found: defect(FrozenCells(*found))
    )
    assert difference(gemma) > 0.01


WRONG = {
    "width": ({"backbone_hidden_size": 40}, FULL, 12, "backbone_hidden_size = 40; wanted 48"),
    "tokens in groups": (
        {"use_ordered_embeddings": True},
        FULL,
        12,
        "num_centroids = 2048; wanted 0, as masked_embedding",
    ),
    "windows": (
        {},
        ("sliding_attention", "full_attention"),
        12,
        r"layer_types\[0\] = 'sliding_attention'; wanted a kind of layer",
    ),
    "heads": ({}, FULL, 8, "4 heads of 8 in layer 0; wanted a multiple of the model's 2 heads of 12"),
}


@pytest.mark.needs("device")
@pytest.mark.parametrize("case", WRONG)
def test_a_draft_that_does_not_fit_is_refused(made: Made, case: str, tmp_path: Path) -> None:
    words, kinds, size, told = WRONG[case]
    frozen(made.target, tmp_path, kinds, size, size)
    with_config(tmp_path, **words)
    with pytest.raises(ConfigError, match=told):
        make(made, draft_model=str(tmp_path))
