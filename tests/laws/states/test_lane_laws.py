"""Layered prefill on a separate stream, in parallel with decode steps. All waits between both
streams are present, and each is necessary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcore.core.errors import ConfigError
from sglcore.runtime.overlap.slices import Passed, Slices
from sglcore.sampling.params import SamplingParams
from sglcore.step.compute_shares import share
from sglcore.step.slice_decisions import INTERLEAVE, PARTITION, PRIORITY
from tests.checkpoints import qwen3_next, save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts, running_slices
from tests.laws.states.test_slice_laws import CONTEXT, Case, ledger_row

pytestmark = pytest.mark.needs("streams", "simulator")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A model with recurrent states too."""
    oracle = qwen3_next(max_position_embeddings=CONTEXT)
    yield save(oracle, tmp_path_factory.mktemp("hybrid")), oracle


def test_slices_have_a_stream_behind_that_of_decode_steps(plain: Case) -> None:
    engine = plain.engine(prompt_lane=PRIORITY)
    streams = engine.worker.runner.streams
    assert streams.lane is not None and streams.lane not in (streams.forward, streams.schedule)
    assert running_slices(engine)._lane is streams.lane
    plain.check(engine)
    row = ledger_row(plain.folder, prompt_slices="auto", prompt_lane=PRIORITY, topic="prompt lane")
    assert (row.effective, row.remedy) == (PRIORITY, "--prompt-lane interleave")


def test_slices_between_decode_steps_have_no_stream(plain: Case) -> None:
    engine = plain.engine(prompt_lane=INTERLEAVE)
    assert engine.worker.runner.streams.lane is None and running_slices(engine)._lane is None
    plain.check(engine)
    assert (
        ledger_row(plain.folder, prompt_slices="9", prompt_lane=INTERLEAVE, topic="prompt lane").reason == "requested"
    )


def test_prompts_that_come_whole_have_no_lane(plain: Case) -> None:
    assert plain.engine(prompt_slices="off").worker.runner.streams.lane is None


def test_a_lane_that_nobody_knows_is_refused(plain: Case) -> None:
    with pytest.raises(ConfigError, match="prompt_lane is 'fast'; wanted one of auto, partition, priority, interleave"):
        plain.engine(prompt_lane="fast")


def test_prompts_that_are_given_up_leave_their_inputs_before_others_come(plain: Case) -> None:
    """Requests are aborted repeatedly while their layers run; later requests are correct."""
    engine = plain.engine(prompt_slices="1")
    for seed in range(4):
        prompts = random_prompts(seed, (6, 24, 30, 22))
        engine.scheduler.add(engine.request(prompts[0], SHORT))
        for _ in range(3):
            engine.loop.step()
        gone = engine.request(prompts[1], SHORT)
        engine.scheduler.add(gone)
        for _ in range(4 + seed):
            engine.loop.step()
        engine.scheduler.abort(gone.rid)
        check_logprobs(engine.run(prompts[2:], 5, stagger=1), plain.oracle)


SHORT = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def give_up_and_come_at_once(engine: TokenEngine, prompts: list[list[int]]) -> Any:
    """Abort the decoding request and the open prompt while a slice of it runs, and start another
    prompt in the next step."""
    engine.scheduler.add(first := engine.request(prompts[0], SHORT))
    while not first.output_ids:
        engine.loop.step()
    engine.scheduler.add(gone := engine.request(prompts[1], SHORT))
    while running_slices(engine)._open is None:
        engine.loop.step()
    for each in (first, gone):
        engine.scheduler.abort(each.rid)
    return engine.run(prompts[2:], 5)


def test_a_prompt_right_behind_one_that_was_given_up_waits_for_what_the_lane_still_reads(plain: Case) -> None:
    engine = plain.engine(prompt_slices="1")
    for seed in range(3):
        check_logprobs(give_up_and_come_at_once(engine, random_prompts(seed, (6, 24, 22))), plain.oracle)


class ForgetsWithoutAWait(Slices):
    """Mutant: overwrites inputs of an aborted prompt that the lane still reads."""

    def forget(self) -> None:
        self._open = None


@pytest.mark.sim_faults("race")
def test_a_prompt_that_does_not_wait_for_one_that_was_given_up_is_caught(plain: Case) -> None:
    engine = plain.engine(prompt_slices="1")
    running_slices(engine).__class__ = ForgetsWithoutAWait
    with pytest.raises(Exception, match=r"\[race\]"):
        for seed in range(3):
            check_logprobs(give_up_and_come_at_once(engine, random_prompts(seed, (6, 24, 22))), plain.oracle)


class StartsBeforeItsInputs(Slices):
    """Mutant: the lane does not wait for staged inputs."""

    def open(self, *given: Any) -> None:
        self._forward, forward = None, self._forward
        super().open(*given)
        self._forward = forward


class DrawsBeforeTheLastLayer(Slices):
    """Mutant: the forward stream does not wait for the lane."""

    def _join(self) -> None:
        """Wait for nothing."""


class EndsAtOnce(Slices):
    """Mutant: a slice counts as complete once it is queued, so its pages are given to other
    requests too early."""

    def end(self) -> Passed | None:
        made = super().end()
        assert made is not None and self._forward is not None
        made._event.record(self._forward)
        return made


@pytest.mark.sim_faults("race")
@pytest.mark.parametrize("kind", [StartsBeforeItsInputs, DrawsBeforeTheLastLayer])
def test_an_edge_that_is_missing_is_caught(kind: type, hybrid: tuple[Path, Any]) -> None:
    folder, oracle = hybrid
    settings = {"max_model_len": CONTEXT, "max_batch_tokens": 24, "poison": True, "graph": "off"}
    engine = TokenEngine(folder, prompt_slices="1", **settings)
    running_slices(engine).__class__ = kind
    with pytest.raises(Exception, match=r"\[race\]"):
        check_logprobs(engine.run(random_prompts(0, (5, 40, 33, 20, 1, 17)), 9, stagger=2), oracle)


def run_short_of_pages(case: Case, kind: type) -> None:
    """Decode rows preempt prompts with layers still running, and take their pages."""
    probe = case.engine().worker.limits
    size = probe.kv_bytes // (probe.num_pages + 1)
    engine = case.engine(
        kv_cache_memory=(CONTEXT // 4 + 2) * size, prefix_cache=False, prompt_slices="1", max_batch_tokens=8
    )
    running_slices(engine).__class__ = kind
    for seed in range(4):
        check_logprobs(engine.run(random_prompts(seed, (5, 40, 33, 20, 30)), 30, stagger=1), case.oracle)
    assert engine.scheduler.stats().retractions


def test_pages_of_who_gives_way_are_others_when_the_lane_has_done_with_them(plain: Case) -> None:
    run_short_of_pages(plain, Slices)


@pytest.mark.sim_faults("race")
def test_pages_that_are_given_away_too_early_are_caught(plain: Case) -> None:
    with pytest.raises(Exception, match=r"\[race\]"):
        run_short_of_pages(plain, EndsAtOnce)


def shares_taken(engine: TokenEngine) -> list[int]:
    """Record the number of decode rows at the start of each open prompt, and check that its slices
    run on the partition for this number."""
    slices, seen = running_slices(engine), list[int]()
    open_prompt = slices.open

    def noted(host: Any, *given: Any) -> None:
        open_prompt(host, *given)
        assert slices._lane is slices._parts[share(host.decode_rows)].stream
        seen.append(host.decode_rows)

    slices.open = noted  # pyright: ignore[reportAttributeAccessIssue]
    return seen


@pytest.mark.needs("partition")
def test_prompts_keep_to_a_part_of_the_device_by_the_rows_that_decode_beside(
    plain: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thresholds are set low, so that several shares occur."""
    monkeypatch.setattr("sglcore.step.compute_shares.THRESHOLDS", (2, 3))
    engine = plain.engine(prompt_lane=PARTITION, prompt_slices="1")
    streams = engine.worker.runner.streams
    lanes = [part.stream for part in streams.parts]
    assert len(lanes) == len(set(lanes)) == 3 and not {streams.forward, streams.lane, streams.schedule} & set(lanes)
    seen = shares_taken(engine)
    plain.check(engine)
    check_logprobs(engine.run(random_prompts(3, (5, 30, 30, 30, 30)), 40, stagger=6), plain.oracle)
    assert {share(rows) for rows in seen} == {0, 1, 2}, sorted(seen)
    row = ledger_row(plain.folder, prompt_slices="auto", prompt_lane=PARTITION, topic="prompt lane")
    units = [part.units for part in streams.parts]
    assert (row.effective, row.remedy, row.downgrade) == (PARTITION, "--prompt-lane priority", False)
    assert row.reason.startswith(f"streams that use {units[0]}, {units[1]}, {units[2]} of ")
    assert units == sorted(units, reverse=True) and units[-1] > 0


@pytest.mark.needs("partition")
def test_a_model_with_states_is_right_on_parts(hybrid: tuple[Path, Any]) -> None:
    folder, oracle = hybrid
    settings = {"max_model_len": CONTEXT, "max_batch_tokens": 24, "poison": True, "graph": "off"}
    engine = TokenEngine(folder, prompt_slices="1", prompt_lane=PARTITION, **settings)
    check_logprobs(engine.run(random_prompts(0, (5, 40, 33, 20, 1, 17)), 9, stagger=2), oracle)


@pytest.mark.needs("partition")
def test_parts_are_those_of_the_engine_that_was_closed(plain: Case) -> None:
    first = plain.engine(prompt_lane=PARTITION).worker
    parts = first.runner.streams.parts
    first.close()
    assert plain.engine(prompt_lane=PARTITION).worker.runner.streams.parts == parts


@pytest.mark.needs("partition")
def test_engines_side_by_side_share_no_part_and_each_waits_for_its_own(plain: Case) -> None:
    plain.engine(prompt_lane=PARTITION).worker.close()
    engines = [plain.engine(prompt_lane=PARTITION) for _ in range(2)]
    one, other = (engine.worker.runner.streams for engine in engines)
    assert not {part.stream for part in one.parts} & {part.stream for part in other.parts}
    assert set(one.all) == {one.forward, one.lane, one.schedule, *(part.stream for part in one.parts)}


def test_a_device_that_nobody_divides_says_so(plain: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> None:
        raise ConfigError("the package of 'acme' divides no compute units")

    monkeypatch.setattr("sglcore.runtime.overlap.slices_bring_up.make_parts", refused)
    row = ledger_row(plain.folder, prompt_slices="auto", prompt_lane=PARTITION, topic="prompt lane")
    assert (row.effective, row.downgrade) == (PRIORITY, True)
    assert row.reason.startswith("the package of 'acme' divides no compute units: a separate stream")
    row = ledger_row(plain.folder, prompt_slices="auto", topic="prompt lane")
    assert (row.effective, row.downgrade) == (PRIORITY, False)


@pytest.mark.needs("partition")
@pytest.mark.sim_faults("race")
@pytest.mark.parametrize("kind", [StartsBeforeItsInputs, DrawsBeforeTheLastLayer])
def test_an_edge_that_is_missing_on_parts_is_caught(
    kind: type, hybrid: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglcore.step.compute_shares.THRESHOLDS", (2, 3))
    folder, oracle = hybrid
    settings = {"max_model_len": CONTEXT, "max_batch_tokens": 24, "poison": True, "graph": "off"}
    engine = TokenEngine(folder, prompt_slices="1", prompt_lane=PARTITION, **settings)
    running_slices(engine).__class__ = kind
    with pytest.raises(Exception, match=r"\[race\]"):
        check_logprobs(engine.run(random_prompts(0, (5, 40, 33, 20, 1, 17)), 9, stagger=2), oracle)
