"""With hisparse, a prompt moves each of its KV entries to the host once, and to the device once,
however many chunks it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from sglcore.runtime.hisparse import hisparse_staging
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.sampling.params import SamplingParams
from sglcore.step.held_prompt import Held, HeldPrompt
from sglcore.worker.swap_counts import SwapCounts
from tests.laws.attention.test_hisparse_laws import CONTEXT, PAGE, Case
from tests.laws.engine import random_prompts

LENGTH = 144


@pytest.fixture(scope="module", params=["compressed", "latent", "shared"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp("hisparse"))


def moved(case: Case, length: int, chunk: int, **settings: Any) -> tuple[SwapCounts, int]:
    """Prefill a prompt of `length` tokens in chunks; return what was counted, and the bytes of the
    entries of one token in all layers. Its one new token is checked."""
    engine = case.engine(case.top_k, graph="off", max_batch_tokens=chunk, **settings)
    hisparse = engine.worker.runner.attn_backend.hisparse
    assert isinstance(hisparse, HiSparseCoordinator)
    case.check(engine.run(random_prompts(length, (length,)), 1, score_prompts=True))
    shape = hisparse.shape
    return engine.recorder.swaps, len(shape.names) * shape.kept.row.nbytes // shape.kept.ratio


def check_linear(case: Case, chunk: int) -> None:
    """The law: each entry is stored once; each is loaded once, and with each chunk those of at most
    one page again, on which the chunk before it ended."""
    found, token_bytes = moved(case, LENGTH, chunk)
    assert found.stored == LENGTH * token_bytes
    chunks = -(-LENGTH // chunk)
    assert LENGTH * token_bytes <= found.loaded <= (LENGTH + chunks * PAGE) * token_bytes


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("chunk", [16, 24, 48, CONTEXT])
def test_what_a_prompt_moves_grows_with_its_length_alone(case: Case, chunk: int) -> None:
    check_linear(case, chunk)


@pytest.mark.needs("host_rows", "host")
def test_twice_the_prompt_moves_twice_the_bytes(case: Case) -> None:
    one, two = (moved(case, length, PAGE)[0].loaded for length in (LENGTH // 2 // PAGE * PAGE, LENGTH // PAGE * PAGE))
    assert two <= 2.3 * one
    few, many = (moved(case, length, PAGE, **without_room(case))[0].loaded for length in (64, 128))
    assert many > 3 * few


def without_room(case: Case) -> dict[str, str]:
    """Settings with which no prompt keeps its entries between its chunks."""
    return {"hisparse": f'{{"device_buffer_size": {case.top_k}, "prompt_buffer_size": 0}}'}


@pytest.mark.needs("host_rows", "host")
def test_a_prompt_longer_than_its_room_is_copied_from_there_on(case: Case) -> None:
    """The numbers stay right, and the count tells."""
    short = {"hisparse": f'{{"device_buffer_size": {case.top_k}, "prompt_buffer_size": 64}}'}
    none, some, whole = (moved(case, LENGTH, PAGE, **given)[0].loaded for given in (without_room(case), short, {}))
    assert whole < some < none


@pytest.mark.needs("host_rows", "host")
def test_a_cached_beginning_is_brought_once(case: Case) -> None:
    engine = case.engine(case.top_k, graph="off", max_batch_tokens=PAGE)
    base = random_prompts(5, (96,))[0]
    case.check(engine.run([base], 1))
    before = engine.recorder.swaps
    case.check(engine.run([base[:64] + random_prompts(6, (48,))[0]], 1))
    hisparse = engine.worker.runner.attn_backend.hisparse
    assert isinstance(hisparse, HiSparseCoordinator)
    shape = hisparse.shape
    token_bytes = len(shape.names) * shape.kept.row.nbytes // shape.kept.ratio
    assert engine.recorder.swaps.loaded - before.loaded == 112 * token_bytes
    assert engine.recorder.swaps.stored - before.stored == 48 * token_bytes


def copies_old_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a chunk brings all rows of its prompt."""
    chosen = HeldPrompt._chosen

    def again(self: HeldPrompt, batch: Any) -> Held | None:
        found = chosen(self, batch)
        return None if found is None else Held(found.row, 0)

    monkeypatch.setattr(HeldPrompt, "_chosen", again)


def holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: every prompt goes through the rooms that all layers share."""
    monkeypatch.setattr(HeldPrompt, "_chosen", lambda self, batch: None)


def trusts_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: whoever has the slot of the held prompt is taken for it."""
    monkeypatch.setattr("sglcore.step.held_prompt.entering_slots", lambda batch: batch.slots[:0])


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("defect", [copies_old_rows_again, holds_none], ids=lambda each: each.__name__)
def test_a_chunk_that_copies_older_rows_again_is_caught(
    case: Case, defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        check_linear(case, PAGE)


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("is_defect", [False, True], ids=["right", "trusts the slot"])
def test_rows_of_a_prompt_that_was_given_up_are_not_taken_for_the_next_ones(
    case: Case, is_defect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is aborted after two chunks; the next one gets its slot, and a cached beginning that
    ends where the other's chunk ended."""
    if is_defect:
        trusts_the_slot(monkeypatch)
    engine = case.engine(case.top_k, graph="off", max_batch_tokens=PAGE, max_requests=1)
    base, other = random_prompts(7, (2 * PAGE, 90))
    case.check(engine.run([base], 1))
    request = engine.request(other, SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True, max_tokens=4))
    engine.scheduler.add(request)
    for _ in range(2):
        engine.loop.step()
    engine.scheduler.abort(request.rid)
    while engine.loop.has_work:
        engine.loop.step()
    found = engine.run([base + random_prompts(8, (2 * PAGE,))[0]], 1, score_prompts=False)
    with pytest.raises(AssertionError) if is_defect else nullcontext():
        case.check(found)


@pytest.mark.needs("host_rows", "host")
def test_rows_that_are_not_in_the_room_yet_are_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a cached beginning is taken to be in the room already."""
    plan_parts = hisparse_staging.plan_parts

    def planned(batch: Any, pool: Any, rows: int, rooms: Any, held: Held | None, decodes: int) -> Any:
        if held is not None:
            held = Held(held.row, int(batch.extend_prefix_lens_cpu[held.row]))
        return plan_parts(batch, pool, rows, rooms, held, decodes)

    monkeypatch.setattr("sglcore.runtime.hisparse.hisparse_coordinator.plan_parts", planned)
    engine = case.engine(case.top_k, graph="off", max_batch_tokens=PAGE)
    base, other = random_prompts(5, (96, 80))
    engine.run([base], 1)
    engine.run([other], 1)
    with pytest.raises(AssertionError):
        case.check(engine.run([base[:64] + random_prompts(6, (48,))[0]], 1))
