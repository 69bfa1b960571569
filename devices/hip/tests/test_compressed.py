"""DeepSeek-V4's attention over one list per token, on pages that own all rows: prefix hits of every
length around a window and around a block give what no hit gives, and what transformers gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.attention.backend_selection import choose_attention, shape_of
from sglcore.runtime.attention.sparse.compressed import CompressedPlan
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.deepseek_v4_rows import BLOCKS
from sglcore_hip import attention_compressed, package
from sglcore_hip.attention_compressed import DeepseekV4HipRadixBackend
from sglcore_hip.capability import Capability
from sglcore_hip.facts import facts
from tests.checkpoints import Oracle, save
from tests.deepseek_v4 import HEAVY, SPARSE, deepseek_v4
from tests.laws.attention.test_compressed_laws import CompressedEngine
from tests.laws.engine import Result, TokenEngine, check_logprobs, random_prompts
from tests.laws.test_model_laws import check_paths

pytestmark = pytest.mark.needs("simulator")

BACKEND, TOLERANCE = "hip_radix", 5e-5
PAGE = 16
AROUND = (*range(15, 23), 31, 32, 33, 34, 47, 48, 49, 50, 52, 53)
"""Lengths of shared prefixes around the ends of windows, pages and blocks of 16 tokens, and of
blocks of 4."""
BRANCHES = (16, 32, 48)
GIVEN: dict[str, Any] = {"attention_backend": BACKEND, "max_model_len": 160, "poison": True, "graph": "off"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Oracle]]:
    """Blocks of 4 and of 16 tokens, a window of 16."""
    oracle = deepseek_v4()
    yield save(oracle, tmp_path_factory.mktemp("deepseek-v4")), oracle


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    return random_prompts(seed, lengths, 128)


# -- the same as transformers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["off", "full", "breakable", "piecewise"])
def test_chunks_arrivals_hits_and_preemption_change_nothing(checkpoint: tuple[Path, Oracle], graph: str) -> None:
    folder, oracle = checkpoint
    engine = CompressedEngine(folder, graph=graph, attention_backend=BACKEND)
    check_logprobs(engine.run(prompts(1, (5, 60, 17, 34)), 8, score_prompts=True, stagger=2), oracle, TOLERANCE)
    base = prompts(8, (70,))[0]
    for texts in ([base], [base], [base[:37] + tail for tail in prompts(9, (3, 1, 40))]):
        check_logprobs(engine.run(texts, 4), oracle, TOLERANCE)
    check_logprobs(engine.run(prompts(10, (40, 44, 48, 42)), 30, stagger=1), oracle, TOLERANCE)
    stats = engine.scheduler.stats()
    assert stats.hit_tokens >= 64 + 2 * 32 and stats.retractions > 0 and engine.freed.given > 20
    check_paths(engine, graph)


def test_published_ratios_have_transformers_numbers(tmp_path: Path) -> None:
    oracle = deepseek_v4(compress_rates={SPARSE: 4, HEAVY: 128})
    engine = TokenEngine(save(oracle, tmp_path), **{**GIVEN, "page_size": 128, "max_model_len": 320})
    texts = prompts(5, (127, 128, 129, 255, 257))
    check_logprobs(engine.run(texts, 3, score_prompts=True), oracle, TOLERANCE)


def test_the_packages_own_kernels_give_transformers_numbers(tmp_path: Path) -> None:
    kinds = {"num_hidden_layers": 2, "layer_types": (HEAVY, SPARSE), "mlp_layer_types": ("hash_moe", "moe")}
    oracle = deepseek_v4(**kinds)
    given = {**GIVEN, "page_size": PAGE, "kernels": "triton", "max_model_len": 64}
    engine, texts = TokenEngine(save(oracle, tmp_path), **given), prompts(2, (21, 6))
    check_logprobs(engine.run(texts, 2, score_prompts=True), oracle, TOLERANCE)
    check_logprobs(engine.run(texts[:1], 2), oracle, TOLERANCE)
    assert engine.scheduler.stats().hit_tokens == PAGE


# -- prefix hits
# --------------------------------------------------------------------------------------------------


def shared(engine: TokenEngine, length: int = 81) -> list[Result]:
    """Run one text, then for each number in AROUND a text that begins with so many of its tokens.
    The cache keeps window pages for a branch once a text has asked for it."""
    (base,) = prompts(11, (length,))
    for text in (base, *(base[:branch] + [branch] for branch in BRANCHES)):
        engine.run([text], 1)
    texts = [base[:n] + tail for n, tail in zip(AROUND, prompts(12, (3,) * len(AROUND)), strict=True)]
    return [engine.run([text], 4)[0] for text in texts]


def hits(page_size: int) -> int:
    """Return how many tokens the texts in AROUND have in whole pages of the first, at least."""
    return sum(n // page_size * page_size for n in AROUND)


@pytest.mark.parametrize("page_size", [16, 32])
def test_hits_of_every_length_around_windows_and_blocks_are_no_hits(
    checkpoint: tuple[Path, Oracle], page_size: int
) -> None:
    folder, oracle = checkpoint
    given = {**GIVEN, "page_size": page_size, "scramble_pages": 3}
    hitting, missing = TokenEngine(folder, **given), TokenEngine(folder, **given, prefix_cache=False)
    found, wanted = shared(hitting), shared(missing)
    assert hitting.scheduler.stats().hit_tokens >= hits(page_size)
    assert not missing.scheduler.stats().hit_tokens
    check_logprobs(found, oracle, TOLERANCE)
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("window", [1, 5, 15, 17, 20])
def test_hits_with_windows_that_are_no_pages_are_exact(tmp_path: Path, window: int) -> None:
    oracle = deepseek_v4(sliding_window=window)
    engine = TokenEngine(save(oracle, tmp_path), **GIVEN, page_size=PAGE, scramble_pages=4)
    check_logprobs(shared(engine), oracle, TOLERANCE)
    assert engine.scheduler.stats().hit_tokens >= hits(PAGE)


# -- defects
# --------------------------------------------------------------------------------------------------

Defect = Callable[[pytest.MonkeyPatch], None]


def rows_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: block rows belong to the request that stored them, so they are gone when it ends."""
    run = TokenEngine.run

    def ran(engine: TokenEngine, *given: Any, **more: Any) -> list[Result]:
        found, pool = run(engine, *given, **more), engine.worker.runner.attn_backend.token_to_kv_pool
        with engine.worker.runner.streams.running(), torch.inference_mode():
            for layer_id, layer in enumerate(pool.layers):
                if BLOCKS in layer:
                    pool.rows(layer_id, BLOCKS).fill_(torch.nan)
        return found

    monkeypatch.setattr(TokenEngine, "run", ran)


def listing(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[torch.Tensor, torch.Tensor, int, int], None]) -> None:
    """Have `spoil` change the lists of layers that see all blocks: `blocks` int32 [T, W + X], the
    tokens' positions, W, and the ratio."""
    fill = DeepseekV4HipRadixBackend._fill_lists

    def filled(backend: DeepseekV4HipRadixBackend, plan: CompressedPlan, batch: ForwardBatch) -> None:
        fill(backend, plan, batch)
        width = plan.window.shape[1]
        for ratio, blocks in plan.blocks.items():
            if blocks.shape[1] > width:
                spoil(blocks, batch.positions, width, ratio)

    monkeypatch.setattr(DeepseekV4HipRadixBackend, "_fill_lists", filled)


def a_block_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the token that completes a block does not see it."""

    def spoil(blocks: torch.Tensor, positions: torch.Tensor, width: int, ratio: int) -> None:
        places = torch.arange(blocks.shape[1] - width, device=blocks.device)
        blocks[:, width:].masked_fill_(places >= (positions // ratio).unsqueeze(1), -1)

    listing(monkeypatch, spoil)


def windows_as_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the rows of windows are looked for where those of blocks are."""
    init = DeepseekV4HipRadixBackend.__init__

    def made(backend: DeepseekV4HipRadixBackend, *given: Any, **named: Any) -> None:
        init(backend, *given, **named)
        backend._first_windows = dict.fromkeys(backend._first_windows, 0)

    monkeypatch.setattr(DeepseekV4HipRadixBackend, "__init__", made)


def blocks_of_the_indexer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: layers with an indexer do not read their window."""
    choose = DeepseekV4HipRadixBackend.choose

    def chose(backend: DeepseekV4HipRadixBackend, q: Any, weights: Any, layer: Any, batch: ForwardBatch) -> None:
        choose(backend, q, weights, layer, batch)
        _, plan = backend.planned(batch)
        assert plan.chosen is not None
        plan.chosen = plan.chosen[:, -layer.top_k :].contiguous()

    monkeypatch.setattr(DeepseekV4HipRadixBackend, "choose", chose)


@pytest.mark.parametrize(
    "defect",
    [rows_of_requests, a_block_too_late, windows_as_blocks, blocks_of_the_indexer_alone],
    ids=lambda each: each.__name__,
)
def test_a_defect_is_caught(checkpoint: tuple[Path, Oracle], defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, oracle = checkpoint
    defect(monkeypatch)
    engine = TokenEngine(folder, **GIVEN, page_size=PAGE)
    with pytest.raises(AssertionError):
        check_logprobs(shared(engine), oracle, TOLERANCE)


# -- the choice
# --------------------------------------------------------------------------------------------------


def chosen(folder: Path, ledger: DecisionLedger, **settings: Any) -> str:
    """Return the backend that is chosen for the model of an engine."""
    worker = TokenEngine(folder, **{**GIVEN, "page_size": PAGE}).worker
    backend, layers = worker.runner.attn_backend, worker.runner.model.attention_layers
    found = choose_attention(
        EngineConfig(graph="off", **settings),
        package,
        facts(),
        "float32",
        shape_of(layers, is_encoder=False),
        backend.token_to_kv_pool,
        "the model",
        ledger,
    )
    worker.close()
    return found.__name__


def test_it_is_chosen_and_the_ledger_names_it_its_compressor_and_what_was_refused(
    checkpoint: tuple[Path, Oracle],
) -> None:
    ledger = DecisionLedger()
    assert chosen(checkpoint[0], ledger) == "DeepseekV4HipRadixBackend"
    (row,) = (row for row in ledger.rows if row.topic == "attention")
    assert row.effective == BACKEND and "CompressorHip: 8 tokens x 128 channels in a wave of 64" in row.reason
    for name in ("aiter", "triton"):
        assert f"{name} refused: " in row.reason


def test_gpus_with_narrow_waves_get_the_cores_backend(
    checkpoint: tuple[Path, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, narrow = DecisionLedger(), Capability("RX 7900", "gfx1100", 32, 96)
    folder = checkpoint[0]
    monkeypatch.setitem(GIVEN, "attention_backend", "compressed")
    monkeypatch.setattr(attention_compressed, "read_capability", lambda: narrow)
    assert chosen(folder, ledger) == "DeepseekV4AttnBackend"
    (row,) = (row for row in ledger.rows if row.topic == "attention")
    assert f"{BACKEND} refused: it serves GPUs with waves of 64, this GPU has waves of 32" in row.reason
