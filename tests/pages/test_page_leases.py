"""However a request or its prompt engine ends, no page belongs to two requests at once, and none is
lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcore.engine.disaggregation import decode_side, prefill_side
from sglcore.engine.disaggregation.disaggregation_start import PageOptions
from sglcore.schedule.request import State
from tests.checkpoints import llama, save
from tests.laws.engine import random_prompts
from tests.pages.pair import SOUND, Pair, Sides, Single, Text, check_same, drive, pages_of
from tests.planted import planted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(llama(max_position_embeddings=128), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Single]:
    engine = Single(folder, prefix_cache=False)
    yield engine
    engine.engine.close()


def request_of(pair: Pair, name: str) -> Any:
    """A request of the decode engine."""
    scheduler: Any = pair.decode.engine.scheduler
    return scheduler.requests[f"{name}/0"]


def waits(pair: Pair) -> bool:
    """Two other requests hold all pages, so this one has none."""
    return request_of(pair, "gone").state is State.WAITING


def is_asked_for(pair: Pair) -> bool:
    """The prompt engine has not received the request, or not begun it."""
    return request_of(pair, "gone").state is State.ARRIVING and not pair.prompt.side._jobs


def is_computed(pair: Pair) -> bool:
    """Some chunks are computed, and their pages are being sent."""
    return any(job.sent > job.first_page and job.last is None for job in pair.prompt.side._jobs.values())


def is_on_its_way(pair: Pair) -> bool:
    """Everything is sent, and nothing was received yet."""
    is_sent = pair.prompt.engine.scheduler.stats().computed_prompt_tokens >= 38 and not pair.prompt.side._jobs
    return is_sent and request_of(pair, "gone").state is State.ARRIVING


def waits_for_a_slot(pair: Pair) -> bool:
    """Its pages have arrived."""
    return any(each.request_id == "gone" for each in pair.decode.engine.remote.arrivals.written)


def decodes_on(pair: Pair) -> bool:
    """It has produced tokens."""
    return len(pair.decode.texts["gone/0"].tokens) > 3


STATES: dict[str, tuple[Callable[[Pair], bool], dict[str, Any]]] = {
    "waiting": (waits, {"max_requests": 1}),
    "asked for": (is_asked_for, {}),
    "being computed": (is_computed, {"prompt": {"max_batch_tokens": 8}}),
    "on its way": (is_on_its_way, {}),
    "without a slot": (waits_for_a_slot, {"max_requests": 1, "prompt": {"max_requests": 6}}),
    "decoding": (decodes_on, {}),
}


@pytest.mark.parametrize("name", STATES)
def test_an_abort_gives_all_pages_back_and_harms_nobody(name: str, folder: Path, alone: Single) -> None:
    reached, settings = STATES[name]
    before, gone, after = random_prompts(11, (7, 38, 9))
    with Pair(folder, **settings) as pair:
        pair.decode.add("before", before, 40)
        pair.drive(lambda: len(pair.decode.texts["before/0"].tokens) > 1)
        pair.decode.add("gone", gone, 40)
        until(pair, lambda: reached(pair))
        pair.decode.take(pair.decode.engine.abort("gone"))
        pair.decode.add("after", after, 12)
        found = pair.run()
    assert found.pop("gone/0").reason == "abort"
    alone.add("before", before, 40)
    alone.add("after", after, 12)
    check_same(found, alone.run())


def until(pair: Pair, reached: Callable[[], bool]) -> None:
    """Step one engine at a time, so that every state is seen."""
    for _ in range(2000):
        for engine in (pair.decode, *pair.prompts):
            if reached():
                return
            engine.step()
    raise AssertionError("the state was never reached")


class Held:
    """A connection that holds back everything of lease 1, in order, until `release`."""

    def __init__(self, connection: Any) -> None:
        self._connection, self.held, self.is_released = connection, list[tuple[Any, Any]](), False
        self.name = connection.name
        self.close = connection.close

    def queue(self, *values: Any, **named: Any) -> None:
        lease = named.get("lease", values[2] if len(values) > 2 else 0)
        if lease != 1 or self.is_released:
            self._connection.queue(*values, **named)
        else:
            self.held.append((values, named))

    def release(self) -> None:
        self.is_released = True
        for values, named in self.held:
            self._connection.queue(*values, **named)


def hold(pair: Pair) -> Held:
    """Wrap the prompt engine's connection before its first request."""
    drive(lambda: bool(pair.prompt.transfer.peers))
    (number,) = pair.prompt.transfer.peers
    held = pair.prompt.transfer._connections[number] = Held(pair.prompt.transfer._connections[number])
    return held


def late_write(folder: Path, alone: Single, sides: Sides = SOUND) -> dict[str, Text]:
    """Abort a request while its pages are being sent, and start another that needs them before they
    arrive; return the results of both."""
    first, second = random_prompts(12, (50, 51))
    room = {"kv_cache_memory": pages_of(alone, 16), "prompt": {"kv_cache_memory": 8 << 20}}
    with Pair(folder, sides=sides, max_model_len=64, prefix_cache=False, **room) as pair:
        pair.decode.add("gone", first, 2)
        held = hold(pair)
        pair.drive(lambda: len(held.held) > 0)
        pair.decode.take(pair.decode.engine.abort("gone"))
        pair.decode.add("next", second, 10)
        for _ in range(200):
            pair.prompt.step()
            pair.decode.step()
            if len(pair.decode.texts["next/0"].tokens) > 2:
                break
        held.release()
        drive(lambda: len(pair.decode.transfer._inbox) >= len(held.held))
        return pair.run()


def check_late_write(found: dict[str, Text], alone: Single) -> None:
    """The aborted request is reported at once; the other's tokens are right."""
    assert found.pop("gone/0").reason == "abort"
    alone.add("next", random_prompts(12, (50, 51))[1], 10)
    check_same(found, alone.run())


def test_pages_are_free_only_when_their_writer_has_let_go(folder: Path, alone: Single) -> None:
    check_late_write(late_write(folder, alone), alone)


def test_pages_that_are_freed_with_the_abort_are_caught(folder: Path, alone: Single) -> None:
    sound = "            if self._transfer.drained(lease):"
    freed = "            self._engine.remote.arrivals.let_go(claim.request)\n" + sound
    broken = planted(decode_side, sound, freed).DecodeSide
    with pytest.raises(AssertionError):
        check_late_write(late_write(folder, alone, {**SOUND, "decode": broken}), alone)


def check_both_hold_pages(folder: Path, sides: Sides = SOUND) -> None:
    """While pages are being sent, those at the source and at the target are reserved, and there is
    no token yet."""
    with Pair(folder, sides=sides, prefix_cache=False) as pair:
        pair.decode.add("r", random_prompts(13, (18,))[0], 3)
        held = hold(pair)
        for _ in range(200):
            pair.prompt.step()
            pair.decode.step()
        assert held.held
        for each in (pair.prompt, pair.decode):
            each.engine.scheduler.audit()
            assert each.memory.pool.num_pages - each.memory.available == 5
        assert not pair.decode.texts["r/0"].tokens
        held.release()
        pair.run()


def test_pages_on_their_way_belong_to_both(folder: Path) -> None:
    check_both_hold_pages(folder)


HASTE = {
    "source pages are not lent": ("        request.is_lent = True\n", ""),
    "the first token is before its pages": (
        "any(each.progress is Progress.PENDING for each in job.transfers)",
        "False",
    ),
}


@pytest.mark.parametrize("name", HASTE)
def test_haste_is_caught(name: str, folder: Path) -> None:
    broken = planted(prefill_side, *HASTE[name]).PromptSide
    with pytest.raises(AssertionError):
        check_both_hold_pages(folder, {**SOUND, "prompt": broken})


DEFECTS = {
    "the last page is forgotten": (
        prefill_side,
        "-(-cells // size) if request.output_ids else cells // size",
        "cells // size",
    ),
    "pages that are known are written": (prefill_side, "target, ask.first_page)", "target, 0)"),
    "another sample is drawn": (prefill_side, "first_index=ask.sample_index", "first_index=0"),
    "its seed is not sent": (decode_side, "            request.seed,", "            0,"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, folder: Path, alone: Single) -> None:
    module, sound, defect = DEFECTS[name]
    copy = planted(module, sound, defect)
    sides = {**SOUND, **({"prompt": copy.PromptSide} if module is prefill_side else {"decode": copy.DecodeSide})}
    with pytest.raises(AssertionError), Pair(folder, sides=sides) as pair:
        for seed in (1, 2):
            for engine in (pair.decode, alone):
                for place, prompt in enumerate(random_prompts(1, (17, 9, 22))):
                    engine.add(f"r{place}", [*prompt, seed + 5], temperature=1.0, seed=seed, n=2)
            check_same(pair.run(), alone.run())


GONE = "its prompt is lost: the engine at"


def end_the_one_with(pair: Pair, name: str) -> None:
    """Close the prompt engine that has the request's prompt."""
    claims = {each.request.request_id: each.peer for each in pair.decode.side._claims.values()}
    dead = next(each for each in pair.prompts if each.transfer.address == pair.decode.transfer.name(claims[name]))
    dead.engine.close()
    pair.prompts.remove(dead)


def ends_beside_another(folder: Path, sides: Sides = SOUND) -> dict[str, Text]:
    """Close a prompt engine during a request; return the results of this request, of one that runs,
    and of a later one."""
    first, second, third = random_prompts(14, (9, 40, 11))
    with Pair(folder, count=2, sides=sides) as pair:
        pair.decode.add("decodes", first, 30)
        pair.drive(lambda: len(pair.decode.texts["decodes/0"].tokens) > 1)
        pair.decode.add("moved", second, 30, temperature=1.0, seed=9, n=2)
        pair.decode.step()
        end_the_one_with(pair, "moved")
        pair.decode.add("later", third, 5)
        return pair.run()


def check_ends_beside_another(found: dict[str, Text], alone: Single) -> None:
    """All results equal those of one engine."""
    first, second, third = random_prompts(14, (9, 40, 11))
    alone.add("decodes", first, 30)
    alone.add("moved", second, 30, temperature=1.0, seed=9, n=2)
    alone.add("later", third, 5)
    check_same(found, alone.run())


def test_what_a_prompt_engine_had_is_asked_of_another_when_it_ends(folder: Path, alone: Single) -> None:
    check_ends_beside_another(ends_beside_another(folder), alone)


def test_a_prompt_that_is_lost_beside_a_living_engine_is_caught(folder: Path, alone: Single) -> None:
    broken = planted(decode_side, "not peers or claim.tries >= MOST_TRIES", "True").DecodeSide
    with pytest.raises(AssertionError):
        check_ends_beside_another(ends_beside_another(folder, {**SOUND, "decode": broken}), alone)
    alone.run()


def test_a_request_that_each_prompt_engine_ends_with_is_given_up(folder: Path) -> None:
    with Pair(folder, count=4) as pair:
        pair.decode.add("poison", random_prompts(17, (40,))[0])
        for _ in range(decode_side.MOST_TRIES):
            drive(lambda: bool(pair.decode.side._claims), pair.decode)
            end_the_one_with(pair, "poison")
            drive(lambda count=len(pair.prompts): len(pair.decode.transfer.peers) == count, pair.decode)
        found = pair.run()["poison/0"]
        assert found.reason == "error" and found.error.startswith(GONE)
        assert pair.decode.side.lacks == ""


def test_a_prompt_that_fails_on_one_engine_is_asked_of_another(folder: Path, alone: Single) -> None:
    prompt = random_prompts(18, (21,))[0]
    with Pair(folder, count=2) as pair:
        pair.decode.add("r", prompt)
        pair.decode.step()
        (claim,) = pair.decode.side._claims.values()
        failing = next(each for each in pair.prompts if each.transfer.address == pair.decode.transfer.name(claim.peer))
        drive(lambda: bool(failing.side._jobs), failing)
        (name,) = failing.side._jobs
        for output in failing.engine.abort(name):
            failing.side._jobs[name].last = output
        found = pair.run()
    alone.add("r", prompt)
    check_same(found, alone.run())


def test_without_a_prompt_engine_requests_end_at_once_until_it_is_back(folder: Path, alone: Single) -> None:
    (prompt,) = random_prompts(15, (9,))
    with Pair(folder) as pair:
        address = pair.prompt.transfer.address
        pair.prompt.engine.close()
        pair.prompts.clear()
        drive(lambda: not pair.decode.transfer.peers, pair.decode)
        pair.decode.add("early", prompt)
        error = pair.run()["early/0"].error
        assert error == f"no prompt engine of {address} can be reached" == pair.decode.engine.lacks
        assert all(each.is_unserved for each in pair.decode.last)
        pair.prompts.append(Single(folder, PageOptions("prompt", address=address)))
        drive(lambda: bool(pair.decode.transfer.peers))
        assert pair.decode.engine.lacks == ""
        pair.decode.add("late", prompt)
        found = pair.run()
    alone.add("late", prompt)
    check_same(found, alone.run())


def test_random_aborts_leave_nothing_behind_and_change_no_other_text(folder: Path, alone: Single) -> None:
    rng = random.Random(16)
    prefill_side = random_prompts(16, [rng.randint(1, 50) for _ in range(40)])
    settings = {"max_model_len": 96, "kv_cache_memory": pages_of(alone, 40), "prompt": {"max_batch_tokens": 16}}
    with Pair(folder, count=2, **settings) as pair:
        for number, prompt in enumerate(prefill_side):
            pair.decode.add(f"r{number}", prompt, rng.randint(1, 20))
            alone.add(f"r{number}", prompt, 20)
            for _ in range(rng.randint(0, 6)):
                rng.choice([pair.decode, *pair.prompts]).step()
            if rng.random() < 0.4:
                pair.decode.take(pair.decode.engine.abort(f"r{rng.randint(0, number)}"))
        found, wanted = pair.run(), alone.run()
    assert {each.reason for each in found.values()} == {"abort", "length"}
    for name, text in found.items():
        assert text.tokens == wanted[name].tokens[: len(text.tokens)], name
