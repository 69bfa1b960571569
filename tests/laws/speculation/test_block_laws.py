"""Block drafters (DFlash) in whole engines: draft tokens are drawn from the distribution of dense
torch, and change no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglcore.checkpoint.checkpoint_files import DRAFT_FOLDER
from sglcore.config.engine_config import resolve_config
from sglcore.core.errors import ConfigError
from sglcore.engine.start import start
from sglcore.models.drafts.draft_config import offered_head
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.speculative.block_drafts import BlockDrafter
from sglcore.runtime.speculative.drafter import DraftRows
from tests.checkpoints import llama, save
from tests.drafts import AUX_IDS, TARGET, DenseDraft, dflash, with_config
from tests.laws.engine import TokenEngine, on_this_device, random_prompts
from tests.laws.speculation.test_draft_laws import TOLERANCE, Recording, Step, features_of
from tests.laws.speculation.test_speculative_laws import CONTEXT, VOCABULARY
from tests.laws.speculation.test_speculative_laws import run as run_texts
from tests.laws.speculation.texts import check_same

BLOCK, TOKENS = 5, 3
Made = tuple[Any, Path, DenseDraft]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A target, its folder, and a draft in it."""
    target = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    folder = save(target, tmp_path_factory.mktemp("dflash"))
    return target, folder, dflash(target, folder / "draft", BLOCK)


def furthest(target: Any, dense: DenseDraft, tokens: list[int], steps: Sequence[Step]) -> float:
    """Return the largest difference of log-probabilities, over blocks with all their KV slots."""
    features, worst, compared = features_of(target, tokens, "dflash"), 0.0, 0
    for cells, limit, logprobs, _ in steps:
        if cells < len(tokens) and cells + BLOCK <= limit:
            wanted = dense.propose(tokens[1 : cells + 1], features[:cells], ())[:TOKENS]
            worst, compared = max(worst, float((logprobs - wanted).abs().max())), compared + 1
    assert compared > 1
    return worst


def difference(made: Made, **settings: Any) -> float:
    """Run three texts with one engine, the second with the prefix of the first; returns the largest
    difference."""
    target, folder, dense = made
    given = {"draft_tokens": TOKENS, "max_batch_tokens": 8, "scramble_pages": 2, **settings}
    engine = TokenEngine(folder, speculative="dflash", **given)
    recording: Any = Recording(engine.worker.drafter)  # type: ignore[attr-defined]
    engine.worker.drafter = recording  # type: ignore[attr-defined]
    first, other = random_prompts(5, [21, 6])
    worst = 0.0
    try:
        for prompt in (first, [*first[:18], 3], other):
            recording.steps.clear()
            (result,) = engine.run([prompt], 16, temperature=1.0)
            worst = max(worst, furthest(target, dense, prompt + result.tokens, recording.steps))
        assert engine.scheduler.stats().hit_tokens > 0
    finally:
        engine.worker.close()
    return worst


def test_blocks_are_drawn_of_what_dense_torch_gives_on_the_text(made: Made, graph: str) -> None:
    assert difference(made, graph=graph) < TOLERANCE


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_change_no_text(made: Made, overlap: bool) -> None:
    found = []
    for settings in ({}, {"speculative": "dflash", "draft_tokens": TOKENS, "overlap": overlap}):
        engine = TokenEngine(made[1], graph="off", **settings)
        found.append(run_texts(engine))
        engine.worker.close()
    check_same(found[1], found[0])


def is_causal(drafter: Any, rows: DraftRows) -> ForwardBatch:
    batch = BlockDrafter.block(drafter, rows)
    return replace(batch, seq_lens=batch.positions + 1)


def begins_late(drafter: Any, rows: DraftRows) -> ForwardBatch:
    batch = BlockDrafter.block(drafter, rows)
    return replace(batch, positions=batch.positions + (batch.positions > 0))


def injects_nothing_verified(drafter: Any, rows: DraftRows) -> None:
    if not rows.batch.forward_mode.is_decode:
        BlockDrafter.inject(drafter, rows)


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    ("part", "defect"),
    [("block", is_causal), ("block", begins_late), ("inject", injects_nothing_verified)],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_defect_of_a_block_shows(made: Made, part: str, defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Defective(BlockDrafter):
        pass

    setattr(Defective, part, defect)
    monkeypatch.setattr("sglcore.runtime.speculative.kinds.dflash_steps.BlockDrafter", Defective)
    assert difference(made, graph="off") > 0.01


@pytest.mark.needs("graphs.native")
def test_a_block_of_layers_that_are_read_one_late_shows(made: Made, tmp_path: Path) -> None:
    dflash(made[0], tmp_path / "draft", BLOCK, target_layer_ids=[layer + 1 for layer in AUX_IDS])
    assert difference(made, graph="off", draft_model=str(tmp_path / "draft")) > 0.01


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"block_size": None}, "block_size"),
        ({"dflash_config": {"mask_token_id": VOCABULARY}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]}}, "target_layer_ids"),
        ({"hidden_size": 40}, "hidden_size"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(made: Made, words: dict, told: str, tmp_path: Path) -> None:
    dflash(made[0], tmp_path / "draft", BLOCK)
    with_config(tmp_path / "draft", **words)
    with pytest.raises(ConfigError, match=told):
        TokenEngine(made[1], speculative="dflash", draft_model=str(tmp_path / "draft"), draft_tokens=TOKENS)


def test_more_proposals_than_a_block_has_are_refused(made: Made) -> None:
    with pytest.raises(ConfigError, match="draft_tokens is 5, and a block of the draft has 4; .*--draft-tokens 4"):
        TokenEngine(made[1], speculative="dflash", draft_tokens=5)


@pytest.mark.parametrize("settings", [{}, {"draft_tokens": 2}])
def test_the_ledger_tells_as_many_proposals_as_a_block_has(made: Made, tmp_path: Path, settings: dict) -> None:
    folder = save(made[0], tmp_path / "target")
    dflash(made[0], tmp_path / "other", block=4)
    given = {"model": str(folder), "draft_model": str(tmp_path / "other"), "max_requests": 2, **on_this_device()}
    started = start(resolve_config({**given, **settings}, {}))
    started.worker.close()
    (row,) = [each for each in started.ledger.rows if each.topic == "speculative"]
    most = settings.get("draft_tokens", 3)
    assert row.effective.startswith("dflash") and row.effective.endswith(f"{most} tokens a step")
    assert "a draft model was given" in row.reason and started.worker.limits.draft_tokens == most


@pytest.mark.parametrize("name", [DRAFT_FOLDER, "dflash"])
def test_a_draft_beside_the_weights_is_found_by_its_kind(made: Made, tmp_path: Path, name: str) -> None:
    folder = save(made[0], tmp_path / "target")
    dflash(made[0], folder / name)
    assert offered_head(folder) == ("dflash" if name == DRAFT_FOLDER else None)
    engine = TokenEngine(folder, speculative="dflash", draft_tokens=TOKENS)
    assert isinstance(engine.worker.drafter, BlockDrafter)  # type: ignore[attr-defined]
    engine.worker.close()
