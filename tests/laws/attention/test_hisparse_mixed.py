"""With hisparse, decode rows and prompt chunks share steps: decode rows bring in what they chose
and lack, chunks bring in their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from sglcore.runtime.hisparse import hisparse_coordinator
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator, Mixed
from sglcore.worker.schedule_batch import ForwardMode
from sglcore.worker.swap_counts import SwapCounts
from tests.laws.attention.test_hisparse_laws import PAGE, Case
from tests.laws.engine import Result, TokenEngine, random_prompts

PROMPTS = random_prompts(2, (60, *[9, 14, 24, 30] * 3))
"""A request that decodes for a long time, while others come and go."""


@pytest.fixture(scope="module", params=["compressed", "latent", "shared"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp("hisparse"))


class Modes:
    """The kinds of steps that a coordinator planned."""

    def __init__(self, engine: TokenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        found = engine.worker.runner.attn_backend.hisparse
        assert isinstance(found, HiSparseCoordinator)
        self.seen, self.shape, plan = list[ForwardMode](), found.shape, found.plan

        def planned(batch: Any) -> Any:
            self.seen.append(batch.forward_mode)
            return plan(batch)

        monkeypatch.setattr(found, "plan", planned)


def run(engine: TokenEngine) -> list[Result]:
    return engine.run(PROMPTS, 12, stagger=1)


def most_loaded(modes: Modes) -> int:
    """The law's bound: the pages of each prompt once, and in chunks one page more; then each entry
    of each request at most once, because 200 places hold all of a request."""
    shape = modes.shape
    pages = sum(-(-len(prompt) // PAGE) + (len(prompt) > 24) * -(-len(prompt) // 24) for prompt in PROMPTS)
    entries = sum(len(prompt) + 12 for prompt in PROMPTS) // shape.kept.ratio
    return len(shape.names) * (pages * shape.rows_per_page + entries) * shape.kept.row.nbytes


def check(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = case.engine(200, graph="off", prefix_cache=False)
    modes = Modes(engine, monkeypatch)
    case.check(run(engine))
    assert modes.seen.count(ForwardMode.MIXED) >= 8
    assert engine.recorder.swaps.loaded <= most_loaded(modes)


@pytest.mark.needs("host_rows", "host")
def test_a_mixed_step_brings_in_what_its_rows_lack(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, monkeypatch)


@pytest.mark.needs("host_rows", "streams")
@pytest.mark.parametrize("graph", ["off", "breakable", "piecewise"])
def test_mixed_steps_read_what_was_stored(graph: str, tmp_path: Any) -> None:
    """With copies on streams of their own, and with captured prompts."""
    case = Case("shared", tmp_path)
    engine = case.engine(case.top_k, graph=graph)
    case.check(engine.run(PROMPTS[:5], 5, stagger=1))


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("name", ["compressed", "latent", "shared"])
def test_a_text_has_the_very_numbers_that_it_has_with_all_rows_on_the_device(name: str, tmp_path: Any) -> None:
    case, found = Case(name, tmp_path), []
    for more in (MappingProxyType({"hisparse": "off"}), MappingProxyType({})):
        given: Mapping[str, Any] = more
        results = run(case.engine(case.top_k, graph="off", **given))
        found.append([(each.tokens, each.logprobs) for each in results])
    assert found[0] == found[1]


def stages_decode_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a mixed step brings in all rows of the requests that decode."""
    monkeypatch.setattr(hisparse_coordinator, "decode_rows", lambda batch: 0)


def swaps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: what decode rows choose in a mixed step is taken for rows of the device."""

    choose = Mixed.choose

    def chosen_rows(self: Mixed, layer_id: int, chosen: Any, tokens: Any, places: Any) -> Any:
        choose(self, layer_id, chosen, tokens, None)
        return chosen

    monkeypatch.setattr(Mixed, "choose", chosen_rows)


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("defect", [stages_decode_rows, swaps_nothing], ids=lambda each: each.__name__)
def test_a_defect_is_caught(
    case: Case, defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        check(case, monkeypatch)


@pytest.mark.needs("host_rows", "host")
def test_the_counts_of_mixed_steps_are_those_of_steps_apart(case: Case) -> None:
    """The same requests one after the other choose as many entries."""
    together = case.engine(200, graph="off", prefix_cache=False)
    run(together)
    apart = case.engine(200, graph="off", prefix_cache=False)
    for prompt in PROMPTS:
        apart.run([prompt], 12)
    one, other = together.recorder.swaps, apart.recorder.swaps
    assert (one.rows, one.stored) == (other.rows, other.stored) != (SwapCounts().rows, 0)
