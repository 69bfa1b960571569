"""Qwen4-Exp, a model with tables of n-grams in its layers: chunks, other requests, prefix hits,
preemption, overlap, graphs and draft tokens change no number, and texts may contain the token that
ends n-grams."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglcore.config.engine_config import resolve_config
from sglcore.core.errors import ConfigError, StrictError
from sglcore.engine.start import start
from sglcore.layers.ngram_embedding import NgramTable
from sglcore.runtime.registry_builders import PreviousIds
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from sglcore.runtime.token_table import TokenTable
from sglcore.schedule.draft_counts import sums_of
from tests.checkpoints import qwen4_exp, save
from tests.laws.drafters import DRAFTERS, Texts
from tests.laws.engine import TokenEngine, check_logprobs, environ, on_this_device, random_prompts
from tests.laws.test_model_laws import check_paths

pytestmark = pytest.mark.needs("int64")

CONTEXT, STOP = 96, 2
Model = tuple[Path, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The checkpoint and its oracle."""
    oracle = qwen4_exp(max_position_embeddings=CONTEXT)
    return save(oracle, tmp_path_factory.mktemp("ngrams")), oracle


def with_stops(prompts: list[list[int]]) -> list[list[int]]:
    """Put the token that ends n-grams at the start, at the end, and at every seventh place."""
    for row, prompt in enumerate(prompts):
        for place in range(row, len(prompt), 7):
            prompt[place] = STOP
        prompt[-1] = STOP if row % 2 else prompt[-1]
    return prompts


@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_and_other_requests_change_nothing(model: Model, graph: str, overlap: bool) -> None:
    """Chunks of 8 tokens end within n-grams; with overlap the last token is on the device only."""
    folder, oracle = model
    engine = TokenEngine(folder, max_batch_tokens=8, graph_token_buckets=(8,), graph=graph, overlap=overlap)
    prompts = with_stops(random_prompts(4, (21, 5, 1, 13, 30)))
    check_logprobs(engine.run(prompts, 12, stagger=2, score_prompts=True), oracle)
    check_paths(engine, graph)


def test_whole_prompts_are_those_of_chunks(model: Model, graph: str) -> None:
    folder, oracle = model
    engine = TokenEngine(folder, graph=graph, graph_token_buckets=(80,), poison=True)
    check_logprobs(engine.run(with_stops(random_prompts(5, (50, 26, 3))), 9, score_prompts=True), oracle)
    check_paths(engine, graph)


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_prefix_hits_and_retractions_find_the_tokens_before_them(model: Model, overlap: bool) -> None:
    """Prefixes end at pages of four tokens, within the n-grams of the tokens after them."""
    folder, oracle = model
    small = {"kv_cache_memory": 42 << 10, "snapshot_memory": 64 << 10, "max_model_len": 64}
    engine = TokenEngine(folder, max_batch_tokens=16, poison=True, overlap=overlap, **small)
    base = with_stops(random_prompts(8, (21,)))[0]
    for seed in (9, 10, 11):
        prompts = [
            base[:cut] + tail for cut, tail in zip((21, 13, 18, 10), random_prompts(seed, (3, 5, 2, 9)), strict=True)
        ]
        check_logprobs(engine.run(prompts, 24, stagger=1), oracle)
    stats = engine.scheduler.stats()
    assert stats.snapshot_hits and stats.hit_tokens and stats.retractions


@pytest.mark.parametrize("overlap", [False, True])
def test_verified_draft_tokens_read_those_before_them(model: Model, graph: str, overlap: bool) -> None:
    folder, oracle = model
    base = with_stops(random_prompts(8, (9,)))[0] * 3
    prompts = [base + tail for tail in random_prompts(10, (3, 5, 2, 4))]
    plain = TokenEngine(folder, graph="off").run(prompts, 24)
    settings = {"graph_buckets": (1, 2, 5), "graph": graph, "overlap": overlap, "poison": True}
    engine = TokenEngine(folder, speculative="ngram", draft_tokens=4, **settings)
    assert isinstance(engine.worker, SpeculativeWorker)
    engine.worker.drafter = DRAFTERS["guessing"](4, Texts([each.prompt + each.tokens for each in plain]), 97)
    found = engine.run(prompts, 24, stagger=2)
    check_logprobs(found, oracle)
    assert [each.tokens for each in found] == [each.tokens for each in plain]
    check_logprobs(engine.run([each.prompt + each.tokens[:12] for each in found], 12), oracle)
    assert sums_of(engine.scheduler.drafts).accepted > 20
    engine.worker.close()


@pytest.mark.needs("device")
@pytest.mark.parametrize("settings", [{"two_batch_overlap": "on"}, {"prompt_slices": "1"}], ids=["halves", "slices"])
def test_parts_of_a_step_read_their_own_tokens(model: Model, settings: dict[str, Any]) -> None:
    folder, oracle = model
    engine = TokenEngine(folder, graph="off", max_batch_tokens=24, poison=True, **settings)
    prompts = with_stops(random_prompts(5, (1, 5, 30, 17, 9)))
    check_logprobs(engine.run(prompts, 6, score_prompts="prompt_slices" not in settings, stagger=2), oracle)


def last_tokens_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Mutant: the history lacks sampled tokens."""
    right = TokenTable.admit_history

    def admit(self: TokenTable, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        if len(slots) > 4:
            right(self, slots, positions, tokens)

    patch.setattr(TokenTable, "admit_history", admit)


def start_repeats(patch: pytest.MonkeyPatch) -> None:
    """Mutant: the first token is also before itself."""
    right = PreviousIds._before

    def before(self: PreviousIds, slots: Tensor, positions: Tensor, count: int) -> Tensor:
        found = right(self, slots, positions, count)
        return torch.where(found < 0, self._history[slots, 0].unsqueeze(1), found)

    patch.setattr(PreviousIds, "_before", before)


def hash_of_other_places(patch: pytest.MonkeyPatch) -> None:
    """Mutant: each token of an n-gram has the multiplier of the next place."""
    right = NgramTable.rows_of

    def rows_of(self: NgramTable, ids: Tensor, previous: Tensor) -> Tensor:
        own, self.multipliers = self.multipliers, self.multipliers.roll(1)
        found = right(self, ids, previous)
        self.multipliers = own
        return found

    patch.setattr(NgramTable, "rows_of", rows_of)


def one_row_off(patch: pytest.MonkeyPatch) -> None:
    """Mutant: rows are one too far in the last part."""
    right = NgramTable.rows_of

    def rows_of(self: NgramTable, ids: Tensor, previous: Tensor) -> Tensor:
        found = right(self, ids, previous)
        found[:, -1] += 1
        return found

    patch.setattr(NgramTable, "rows_of", rows_of)


def parts_of_other_n(patch: pytest.MonkeyPatch) -> None:
    """Mutant: the parts of pairs are read by triples, and the other way round."""
    right = NgramTable.rows_of

    def rows_of(self: NgramTable, ids: Tensor, previous: Tensor) -> Tensor:
        return right(self, ids, previous).roll(self._net.heads, 1)

    patch.setattr(NgramTable, "rows_of", rows_of)


def no_end(patch: pytest.MonkeyPatch) -> None:
    """Mutant: n-grams go on over the token that ends them."""
    right = NgramTable.rows_of

    def rows_of(self: NgramTable, ids: Tensor, previous: Tensor) -> Tensor:
        far = previous[:, 1]
        kept = torch.where((far >= 0) & (previous[:, 0] == STOP), 3, previous[:, 0])
        return right(self, ids, torch.stack([kept, far], 1))

    patch.setattr(NgramTable, "rows_of", rows_of)


DEFECTS = (last_tokens_forgotten, start_repeats, hash_of_other_places, one_row_off, parts_of_other_n, no_end)


@pytest.mark.needs("device")
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_caught(
    model: Model, defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = model
    defect(monkeypatch)
    engine = TokenEngine(folder, max_batch_tokens=8, graph="off")
    with pytest.raises(AssertionError, match="first divergent"):
        check_logprobs(engine.run(with_stops(random_prompts(4, (21, 13))), 7, stagger=2, score_prompts=True), oracle)


def changed(folder: Path, other: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Return a copy of the checkpoint with other weights."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    (other / "config.json").write_text((folder / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    return other


TABLE = "model.layers.0.ple.ple_embedding."


def whole_table(weights: dict[str, Tensor]) -> None:
    parts = [weights.pop(f"{TABLE}ngram_embedding.shard_{number}.weight") for number in range(3)]
    weights[f"{TABLE}ngram_embedding.weight"] = torch.cat(parts)


def parts_in_another_order(weights: dict[str, Tensor]) -> None:
    first, last = (f"{TABLE}ngram_embedding.shard_{number}.weight" for number in (0, 2))
    weights[first], weights[last] = weights[last], weights[first]


def of_language_part(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if name.startswith("model.")]:
        weights[name.replace("model.", "model.language_model.", 1)] = weights.pop(name)
    weights["model.visual.merger.norm.weight"] = torch.ones(3)


def test_the_language_part_of_a_model_with_a_vision_part_is_read(model: Model, tmp_path: Path) -> None:
    folder = changed(model[0], tmp_path, of_language_part)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    whole = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    engine = TokenEngine(folder, graph="off")
    check_logprobs(engine.run(with_stops(random_prompts(4, (21, 13))), 5, score_prompts=True), model[1])


def test_a_table_may_be_stored_whole(model: Model, tmp_path: Path) -> None:
    engine = TokenEngine(changed(model[0], tmp_path, whole_table), graph="off")
    check_logprobs(engine.run(random_prompts(4, (21, 13)), 5, score_prompts=True), model[1])


def test_a_table_in_another_order_is_caught(model: Model, tmp_path: Path) -> None:
    engine = TokenEngine(changed(model[0], tmp_path, parts_in_another_order), graph="off")
    with pytest.raises(AssertionError, match="first divergent"):
        check_logprobs(engine.run(random_prompts(4, (21, 13)), 5, score_prompts=True), model[1])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ngram_heads_offsets", lambda found: found.flip(0)),
        ("ngram_heads_vocab_sizes", lambda found: found + 40),
        ("ngram_heads_vocab_sizes", lambda found: found * 0),
    ],
)
def test_parts_outside_of_the_table_or_over_each_other_are_refused(
    model: Model, tmp_path: Path, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    def change_weights(weights: dict[str, Tensor]) -> None:
        weights[TABLE + name] = change(weights[TABLE + name]).contiguous()

    with pytest.raises(ConfigError, match=r"ple_embedding\. has parts of .* in a table of 240 rows; wanted parts in"):
        TokenEngine(changed(model[0], tmp_path, change_weights), graph="off")


def test_texts_in_which_layers_would_select_tokens_are_refused(tmp_path: Path) -> None:
    folder = save(qwen4_exp(indexer_budget=24), tmp_path)
    found = "in texts of more than 27 tokens Qwen4ExpForCausalLM attends to selected tokens, which is not supported yet"
    with pytest.raises(ConfigError, match=f"max_model_len is 28, {found}; set max_model_len to at most 27"):
        TokenEngine(folder, max_model_len=28)
    made = start(resolve_config({"model": str(folder), **on_this_device()}, environ()))
    rows = [row for row in made.ledger.rows if row.topic == "context"]
    assert [(row.requested, row.effective, row.downgrade) for row in rows] == [("64", "27", True)]
    assert rows[0].reason == found and made.worker.limits.max_model_len == 27
    with pytest.raises(StrictError):
        start(resolve_config({"model": str(folder), "strict": True, **on_this_device()}, environ()))


def test_a_text_of_the_longest_dense_context_is_the_oracles(tmp_path: Path) -> None:
    oracle = qwen4_exp(indexer_budget=24)
    engine = TokenEngine(save(oracle, tmp_path), graph="off")
    check_logprobs(engine.run(random_prompts(4, (20, 9)), 7, score_prompts=True), oracle)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"eos_token_id": None}, r"n-gram tables and eos_token_id None; wanted a token id"),
        ({"ple_layer_ids": [4]}, r"ple_layer_ids \[4\]; wanted layers from 1 to 3"),
        ({"ple_embed_dim": 26}, "gives 26 elements to 4 rows of n-grams; wanted a multiple"),
        ({"output_gate_type": "tanh"}, "output_gate_type 'tanh'; wanted 'silu' or 'sigmoid'"),
    ],
)
def test_a_file_that_does_not_fit_together_is_refused(
    model: Model, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    config = json.loads((model[0] / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    (tmp_path / "model.safetensors").symlink_to(model[0] / "model.safetensors")
    with pytest.raises(ConfigError, match=reason):
        TokenEngine(tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"task": "embed"}, "embeds n-grams, which is not supported yet for a model that embeds texts"),
        ({"speculative": "mtp", "draft_width": 2}, "keeps a state of each request"),
    ],
)
def test_what_does_not_go_with_ngrams_is_refused(model: Model, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TokenEngine(model[0], **settings)
