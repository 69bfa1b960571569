"""Draft tokens change no text of models with other KV layouts: compressed blocks with a sliding
window and rings of the last tokens, or latent rows selected by an indexer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.runtime.attention.sparse import compressed
from sglcore.runtime.attention.sparse.token_queries import RequestRows
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory import deepseek_v4_rows as rows
from sglcore.runtime.speculative.ngram_drafts import NgramDrafter
from sglcore.runtime.speculative.speculation_choice import most_drafts
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from tests.checkpoints import save
from tests.deepseek_v4 import HEAVY, SPARSE, deepseek_v4, with_published_names
from tests.drafts import next_token
from tests.latent import deepseek_v32
from tests.laws.drafters import DRAFTERS, Texts
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.speculation.test_speculative_laws import run
from tests.laws.speculation.texts import check_same

TOKENS = 44
"""So long that the shortest text crosses two windows, and blocks of both sizes."""
LENGTHS = (7, 23, 40, 5, 16)
COMPRESSED: Mapping[str, Any] = MappingProxyType({"attention_backend": "compressed", "page_size": 16})
LATENT: Mapping[str, Any] = MappingProxyType({"attention_backend": "latent"})


@dataclass
class Case:
    """A checkpoint, engines over it, and the results of some prompts without draft tokens."""

    folder: Path
    settings: Mapping[str, Any]
    vocab_size: int
    lengths: tuple[int, ...] = LENGTHS
    tokens: int = TOKENS

    def __post_init__(self) -> None:
        self.prompts = random_prompts(3, self.lengths, self.vocab_size)
        self.made: list[TokenEngine] = []
        self.plain = run(self.engine(), self.prompts, self.tokens)

    def engine(self, **settings: Any) -> TokenEngine:
        """Make an engine with poisoned unused rows."""
        given = {"max_model_len": 96, "max_batch_tokens": 40, "graph_token_buckets": (40,), "graph_buckets": (1, 5)}
        self.made.append(
            TokenEngine(self.folder, **{**given, "poison": True, "graph": "off", **self.settings, **settings})
        )
        return self.made[-1]

    def verify(self, drafter: str, tokens: int | None = 4, times: int = 1, **settings: Any) -> TokenEngine:
        """Run the prompts with one of DRAFTERS, or with a drafter kind of the configuration, and
        check the texts."""
        kind = "ngram" if drafter in DRAFTERS else drafter
        engine = self.engine(speculative=kind, draft_tokens=tokens, **settings)
        assert isinstance(engine.worker, SpeculativeWorker)
        if drafter in DRAFTERS:
            whole = [prompt + output for prompt, output in zip(self.prompts, self.plain.tokens, strict=True)]
            engine.worker.drafter = DRAFTERS[drafter](tokens or 4, Texts(whole), self.vocab_size)
        for _ in range(times):
            check_same(run(engine, self.prompts, self.tokens), self.plain)
        return engine

    def close(self) -> None:
        for engine in self.made:
            engine.worker.close()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A model with blocks of 4 and of 16 tokens, a window of 16, and one MTP layer."""
    folder = with_published_names(deepseek_v4(), tmp_path_factory.mktemp("deepseek-v4"))
    made = Case(folder, COMPRESSED, 128)
    yield made
    made.close()


CORE = pytest.mark.needs("graphs.native")
"""Independent of the device; runs where the core's own kernels are fastest."""
KINDS = [pytest.param("off", marks=pytest.mark.needs("device"))]
KINDS += [pytest.param(kind, marks=pytest.mark.needs(f"graphs.{kind}")) for kind in ("native", "full", "breakable")]


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_change_no_text(case: Case, kind: str) -> None:
    engine = case.verify("guessing", graph=kind, overlap=True)
    assert kind == "off" or {path for path in engine.paths if path != "eager"}, engine.paths


@CORE
@pytest.mark.parametrize("kind", ["off", "native"])
@pytest.mark.parametrize(
    ("drafter", "overlap"), [("oracle", True), ("adversary", True), ("guessing", False), ("ngram", True), ("mtp", True)]
)
def test_no_drafter_changes_a_text(case: Case, drafter: str, kind: str, overlap: bool) -> None:
    case.verify(drafter, graph=kind, overlap=overlap)


@CORE
def test_replays_of_verified_rows_are_what_they_are_beside(case: Case) -> None:
    graphs = case.verify("guessing", graph="native", shadow=1).worker.runner.graphs
    assert graphs is not None and graphs.shadow is not None and graphs.shadow.compared > 10


def rings_in(engine: TokenEngine) -> set[int]:
    """Return the ring sizes of an engine's layers, in tokens."""
    layers = engine.worker.runner.attn_backend.token_to_kv_pool.layers
    return {kept.ring for layer in layers for kept in layer.values() if kept.ring}


@CORE
@pytest.mark.parametrize(("tokens", "rings"), [(1, {8, 16}), (3, {16, 32}), (10, {32})])
def test_their_number_changes_none(case: Case, tokens: int, rings: set[int]) -> None:
    assert rings_in(case.verify("guessing", tokens, page_size=32)) == rings


@CORE
def test_rings_hold_more_where_proposals_may_be_verified(case: Case) -> None:
    assert rings_in(case.engine()) == rings_in(case.engine(speculative="off")) == {8, 16}
    for asked in (EngineConfig(speculative="auto"), EngineConfig(speculative="mtp"), EngineConfig(draft_model="/d")):
        assert most_drafts(asked) == 5


@CORE
def test_numbers_that_change_change_none(case: Case) -> None:
    """Includes steps without draft tokens, when the host knows only an upper bound of the
    lengths."""
    engine = case.verify("guessing", None, times=3, overlap=True)
    assert isinstance(engine.worker, SpeculativeWorker)
    assert set().union(*(each.seconds for each in engine.worker.length._evidence.values())) == {0, 1, 3, 4}


@CORE
@pytest.mark.parametrize("overlap", [False, True])
def test_a_cache_that_holds_no_two_texts_changes_none(case: Case, overlap: bool) -> None:
    engine = case.verify("guessing", overlap=overlap, kv_cache_memory=300 << 10)
    assert engine.worker.limits.capacity < sum(LENGTHS) + len(LENGTHS) * TOKENS
    assert engine.scheduler.stats().retractions > 0


@CORE
def test_texts_that_go_on_from_verified_pages_are_the_same(case: Case) -> None:
    """Prompts continue texts with draft tokens, from the end of each page."""
    bases = [prompt + output for prompt, output in zip(case.prompts, case.plain.tokens, strict=True)]
    prompts = [base[:end] + tail for base in bases for end in (32, 48) for tail in random_prompts(end, (2, 9), 128)]
    samplings = [{"temperature": 1.0, "seed": seed} for seed in range(len(prompts))]
    engine = case.verify("guessing")
    worker: Any = engine.worker
    worker.drafter = NgramDrafter(4)
    found = run(engine, prompts, 12, samplings)
    assert engine.scheduler.stats().hit_tokens >= 32 * len(prompts)
    check_same(found, run(case.engine(), prompts, 12, samplings))


@CORE
def test_published_ratios_change_none(tmp_path: Path) -> None:
    """Texts end near multiples of 128 tokens, the block size."""
    folder = save(deepseek_v4(compress_rates={SPARSE: 4, HEAVY: 128}), tmp_path)
    settings = {**COMPRESSED, "page_size": 128, "max_model_len": 320}
    case = Case(folder, settings, 128, lengths=(119, 125, 127, 128, 250), tokens=24)
    case.verify("guessing", overlap=True)
    case.close()


@CORE
@pytest.mark.parametrize("drafter", ["guessing", "mtp"])
def test_proposals_change_no_text_of_chosen_latent_rows(tmp_path: Path, drafter: str) -> None:
    next_token(deepseek_v32(), tmp_path, deepseek_v32, first_k_dense_replace=0)
    case = Case(tmp_path, LATENT, 97)
    case.verify(drafter, overlap=True)
    case.close()


def rings_of(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the ring size to the smallest possible (block span plus tokens that a step may roll
    back), plus `spare`."""
    monkeypatch.setattr(rows, "ring_size", lambda ratio, span, drafts: span + drafts - 2 + spare)


def one_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a ring lacks one entry."""
    rings_of(-1, monkeypatch)


def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: compresses a block from tokens kept before the step and its last token only."""
    of = RequestRows.of
    monkeypatch.setattr(RequestRows, "of", lambda batch: of(replace(batch, width=None)))


def counted_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: counts completed blocks by the host's upper bound of the lengths."""

    def most(batch: ForwardBatch, ratio: int) -> int:
        assert batch.seq_lens_cpu is not None
        begins = batch.seq_lens_cpu - (1 if batch.extend_seq_lens_cpu is None else batch.extend_seq_lens_cpu)
        return int((batch.seq_lens_cpu // ratio - begins // ratio).sum())

    monkeypatch.setattr(compressed, "_most_completed", most)


@CORE
def test_a_ring_that_is_as_long_as_it_must_be_changes_none(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    rings_of(0, monkeypatch)
    for drafter in ("guessing", "adversary"):
        case.verify(drafter, page_size=None)


@CORE
@pytest.mark.parametrize("defect", [one_short, row_by_row], ids=lambda each: each.__name__)
def test_a_defect_is_caught(case: Case, defect: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        case.verify("guessing", page_size=None)


@CORE
def test_blocks_that_the_host_counts_show_as_it_does_not_know_lengths(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted_by_the_host(monkeypatch)
    with pytest.raises(AssertionError):
        case.verify("adversary", 1)
