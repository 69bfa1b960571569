"""One memory for pages of all tokens and window pages: whatever either kind takes from the other,
results are those of transformers, and of separate pools with ample memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sglcore.config.engine_config import resolve_config
from sglcore.core.errors import ConfigError
from sglcore.engine.start import start
from sglcore.runtime.attention.windowed import WindowedAttention
from sglcore.schedule.cache.shared_pages import SharedPages
from tests.checkpoints import gemma2, gemma3, gpt_oss, llama, mistral, save
from tests.laws.engine import check_logprobs, environ, on_this_device, random_prompts
from tests.laws.states.saturation import Arrival, Ran, draw_load, run_load
from tests.laws.test_model_laws import check_paths
from tests.laws.windows import WindowEngine

CONTEXT = 96
WINDOW, FULL = "sliding_attention", "full_attention"


def layered(*kinds: str) -> Callable[..., Any]:
    """Return a function that makes a Gemma 3 with these layers."""
    return lambda **sizes: gemma3(layer_types=list(kinds), num_hidden_layers=len(kinds), **sizes)


ARCHITECTURES: MappingProxyType[str, tuple[Callable[..., Any], int, dict[str, Any]]] = MappingProxyType(
    {
        "gemma2": (gemma2, 1, {}),
        "gpt-oss": (gpt_oss, 1, {}),
        "gemma3-4": (layered(WINDOW, WINDOW, FULL, WINDOW, WINDOW), 4, {}),
        "gemma3-2": (layered(WINDOW, FULL, WINDOW, FULL, WINDOW), 2, {}),
        "gemma3-transformers": (layered(WINDOW, WINDOW, FULL), 2, {"model_impl": "transformers"}),
    }
)
"""Models with windows of six tokens, how many pages their window pages have, and their settings.
Of `gemma3-2` one page in four has no layer."""


class Case:
    """A saved checkpoint, its oracle, and what separate pools with ample memory make of a load."""

    def __init__(self, name: str, folder: Path) -> None:
        make, self.unit, self.settings = ARCHITECTURES[name]
        self.oracle = make(max_position_embeddings=CONTEXT)
        self.folder = save(self.oracle, folder)
        self.load = draw_load(6, 24, CONTEXT)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of four tokens in all layers with full attention, in float32."""
        config = self.oracle.config
        kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
        return 4 * 2 * kinds.count(FULL) * config.num_key_value_heads * config.head_dim * 4

    @cached_property
    def alone(self) -> Ran:
        """The results of `load` with separate pools that hold everything."""
        engine = WindowEngine(self.folder, kv_memory="split", graph="off", kv_cache_memory=16 << 20, **self.settings)
        assert not engine.worker.limits.window_unit
        ran = run_load(engine, self.load)
        assert not engine.scheduler.stats().retractions
        check_logprobs(list(ran.results.values()), self.oracle)
        return ran

    def engine(self, pages: int | None = None, **settings: Any) -> WindowEngine:
        """Make an engine with a shared memory of `pages` pages (None: little more than one request
        needs)."""
        pages = pages or 24 + 8 * self.unit
        given = {"kv_memory": "shared", "kv_cache_memory": pages * self.page_bytes, "max_requests": 6}
        engine = WindowEngine(self.folder, **{**given, **self.settings, **settings})
        assert engine.worker.limits.window_unit == self.unit
        return engine


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_load_that_saturates_the_memory_changes_nothing(case: Case, graph: str, overlap: bool) -> None:
    """Random arrivals, chunks, prefix hits, preemption and aborts."""
    engine = case.engine(graph=graph, overlap=overlap, poison=True)
    ran = run_load(engine, case.load)
    check_logprobs(list(ran.results.values()), case.oracle)
    for index, result in ran.results.items():
        assert result.tokens == case.alone.tokens[index], f"request {index}"
    for mine, alone in zip(ran.tokens, case.alone.tokens, strict=True):
        assert mine[: len(alone)] == alone[: len(mine)]
    stats = engine.scheduler.stats()
    assert min(stats.retractions, stats.hit_tokens, stats.evicted_pages, stats.evicted_window_pages) > 0, stats
    assert min(engine.freed.given, engine.freed_full.given) > 60
    check_paths(engine, graph)


@pytest.mark.needs("device")
def test_pages_of_another_size_and_no_prefix_cache_change_nothing(case: Case) -> None:
    engine = case.engine(60 * case.unit, graph="off", page_size=3, prefix_cache=False)
    check_logprobs(engine.run(random_prompts(2, (5, 30, 17, 9)), 16, score_prompts=True, stagger=2), case.oracle)
    assert engine.freed.given > 40


@pytest.mark.needs("device")
@pytest.mark.parametrize("kinds", [(WINDOW, FULL), (WINDOW, WINDOW, FULL)])
def test_long_pages_and_windows_longer_than_a_page_change_nothing(kinds: tuple[str, ...], tmp_path: Path) -> None:
    oracle = layered(*kinds)(max_position_embeddings=768, sliding_window=150)
    pages = 6 + 5 * (len(kinds) - 1) + len(kinds)
    memory = pages * 128 * 2 * oracle.config.num_key_value_heads * oracle.config.head_dim * 4
    engine = WindowEngine(
        save(oracle, tmp_path),
        kv_memory="shared",
        kv_cache_memory=memory,
        page_size=128,
        max_model_len=768,
        max_batch_tokens=128,
        max_requests=3,
        graph="off",
    )
    base = random_prompts(6, (300,))[0]
    prompts = [base, *random_prompts(7, (520, 20, 140)), base + [5, 6, 7]]
    check_logprobs(engine.run(prompts, 9, stagger=2), oracle)
    assert engine.worker.limits.window_unit == len(kinds) - 1 and engine.freed.given > 5


def most_at_once(engine: WindowEngine, lengths: list[int], max_tokens: int) -> int:
    """The most requests that run at the same time; all arrive at once."""
    load = [Arrival(0, prompt, max_tokens, None) for prompt in random_prompts(3, lengths)]
    ran = run_load(engine, load)
    assert len(ran.results) == len(load)
    return ran.most_running


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    ("name", "pages", "length", "max_tokens"), [("gpt-oss", 60, 70, 2), ("gpt-oss", 40, 6, 10), ("gemma3-4", 120, 6, 8)]
)
def test_more_requests_run_at_once_than_with_pools_of_their_own(
    name: str, pages: int, length: int, max_tokens: int, tmp_path: Path
) -> None:
    """Long texts leave window pages idle, and many short ones run short of them."""
    case, most = Case(name, tmp_path), dict[str, int]()
    given = {"max_requests": 24, "graph": "off", "prefix_cache": False, "max_batch_tokens": 24, **case.settings}
    for kv_memory in ("split", "shared"):
        engine = WindowEngine(case.folder, kv_memory=kv_memory, kv_cache_memory=pages * case.page_bytes, **given)
        most[kv_memory] = most_at_once(engine, [length] * 16, max_tokens)
    assert most["shared"] > most["split"], most


def started(folder: Path, **settings: Any) -> Any:
    """Start an engine of few requests over the checkpoint."""
    given = {"model": str(folder), **on_this_device(), "dtype": "float32", "graph": "off", "max_batch_tokens": 8}
    return start(resolve_config({**given, "max_requests": 2, "page_size": 4, **settings}, environ()))


@pytest.mark.needs("device")
def test_the_ledger_says_what_is_shared_and_layers_have_views_of_one_storage(tmp_path: Path) -> None:
    kinds = (WINDOW, WINDOW, FULL, WINDOW, FULL)
    found = started(save(layered(*kinds)(max_position_embeddings=CONTEXT), tmp_path))
    (row,) = (row for row in found.ledger.rows if row.topic == "kv memory")
    assert (row.requested, row.effective, row.remedy) == ("auto", "shared", "--kv-memory split")
    assert row.reason.startswith("3 layers with windows, 2 with all tokens; a window page takes 2 of the pages, 25%")
    limits, backend = found.worker.limits, found.worker.runner.attn_backend
    assert isinstance(backend, WindowedAttention)
    full, windows = backend.token_to_kv_pool, backend.window.token_to_kv_pool
    assert full.num_cells == 4 * (limits.num_pages + 1) == windows.num_cells + 4
    pages = [full.kv(layer)[0].narrow(0, 0, 1).nbytes * (4 if full.layout == "cell_major" else 1) for layer in (2, 4)]
    places = {layer: [part.data_ptr() for part in windows.kv(layer)] for layer in (0, 1, 3)}
    held = {layer: [part.data_ptr() for part in full.kv(layer)] for layer in (2, 4)}
    assert places == {0: held[2], 1: held[4], 3: [address + pages[0] for address in held[2]]}
    assert all(part.numel() == 0 for layer in (0, 1, 3) for part in full.kv(layer))
    assert all(part.numel() == 0 for layer in (2, 4) for part in windows.kv(layer))


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    ("make", "settings", "why"),
    [
        (llama, {}, "no layer has a sliding window"),
        (lambda **sizes: mistral(sliding_window=6, **sizes), {}, "every layer keeps a sliding window only"),
        (gpt_oss, {"max_batch_tokens": 90}, "no window page would be freed"),
        (gpt_oss, {"kv_cache_memory": 20000}, "one request of 96 tokens and its windows need 30"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_its_reason(
    make: Callable[..., Any], settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = save(make(max_position_embeddings=CONTEXT), tmp_path)
    with pytest.raises(ConfigError, match=f"kv_memory is shared; .*{why}"):
        started(folder, kv_memory="shared", **settings)
    assert not started(folder, **settings).worker.limits.window_unit


def page_too_low(engine: WindowEngine) -> None:
    """Plant a map that is off by one: two layers of one storage have the same page of a block."""
    backend: Any = engine.worker.runner.attn_backend
    pool = backend.window.token_to_kv_pool
    first, second = 0, 4
    assert pool._kv[first][0].data_ptr() < pool._kv[second][0].data_ptr()
    pool._kv[second] = pool._kv[first]


class StaysInBothKinds(SharedPages):
    """Mutant: a page of all tokens comes from the top too, where window pages are."""

    def audit(self, used, idle, windows, idle_windows) -> None:
        """Do nothing: the numbers must show it."""

    def take_pages(self, count: int) -> list[int]:
        taken = super().take_pages(count)
        return [self.num_pages + self.unit - page for page in taken]

    def give_pages(self, pages) -> None:
        super().give_pages([self.num_pages + self.unit - page for page in pages])

    def use_page(self, page: int) -> None:
        """Do nothing."""

    def leave_page(self, page: int) -> None:
        """Do nothing."""


def both_kinds(engine: WindowEngine) -> None:
    """Plant the defect on the host."""
    shared: Any = engine.scheduler.running.memory.shared
    shared.__class__ = StaysInBothKinds


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    ("case", "defect"),
    [("gemma3-2", page_too_low), ("gpt-oss", both_kinds)],
    indirect=["case"],
)
def test_a_page_of_two_owners_is_seen(case: Case, defect: Callable[[WindowEngine], None]) -> None:
    engine = case.engine(graph="off", prefix_cache=False)
    defect(engine)
    with pytest.raises(AssertionError):
        check_logprobs(engine.run(random_prompts(1, (30, 9)), 12), case.oracle)
