"""The generation for one prompt at its edges: what is told twice or never, and the times between
its tokens."""

from __future__ import annotations

import asyncio

import pytest

from sglcore.engine.outputs import PromptProgress, TextDelta
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import EngineOutput
from tests.serving.chat_completions.test_generation import KeptClock, make


def test_progress_that_was_read_is_no_part_of_the_output_and_is_not_told_again_by_another_engine() -> None:
    async def play() -> None:
        generation = make(KeptClock(), SamplingParams(max_tokens=2))
        generation.request.progress = True
        generation.deliver(EngineOutput("r", 0, cached_tokens=1, processed=1))
        assert await anext(generation) == PromptProgress("r", 2, 1, 1) and not generation.is_told
        generation.restart()
        generation.deliver(EngineOutput("r", 0, cached_tokens=0, processed=1))
        generation.deliver(EngineOutput("r", 0, [9], "length"))
        found = [each async for each in generation]
        assert found[0] == PromptProgress("r", 2, 0, 2) and generation.is_told
        assert [type(each) for each in found] == [PromptProgress, TextDelta]

    asyncio.run(play())


@pytest.mark.parametrize("has_tokens", [False, True])
def test_an_error_comes_after_what_has_arrived_and_again_for_who_reads_on(has_tokens: bool) -> None:
    async def play() -> None:
        clock, closed = KeptClock(), list[str]()
        generation = make(clock, SamplingParams(n=2, max_tokens=3))
        generation.when_closed(lambda: closed.append("closed"))
        if has_tokens:
            generation.deliver(EngineOutput("r", 1, [9], "length", cached_tokens=1))
        reading = asyncio.ensure_future(anext(generation))
        await asyncio.sleep(0)
        for text in ("planted", "later"):
            generation.fail(RuntimeError(text))
        generation.abort()
        if has_tokens:
            delta = await reading
            assert isinstance(delta, TextDelta) and (delta.index, delta.finish_reason) == (1, "length")
            reading = asyncio.ensure_future(anext(generation))
        with pytest.raises(RuntimeError, match="planted"):
            await asyncio.wait_for(reading, 60)
        with pytest.raises(RuntimeError, match="planted"):
            await asyncio.wait_for(generation.wait(), 60)
        assert (clock.ends, closed, clock.prompt) == (["RuntimeError"], ["closed"], (2, int(has_tokens)))
        assert generation.is_over and generation.output.outputs[0].finish_reason is None

    asyncio.run(play())


def test_the_gap_between_tokens_is_the_time_since_the_sample_had_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now, gaps = [100.0], list[tuple[int, float]]()
    clock = KeptClock()
    clock.on_tokens = lambda count, seconds: gaps.append((count, seconds))
    generation = make(clock, SamplingParams(n=2, max_tokens=9))
    monkeypatch.setattr("sglcore.serving.replicas.prompt_generation.time.perf_counter", lambda: now[0])
    for index, seconds, count in ((0, 0.0, 1), (1, 1.0, 2), (0, 3.0, 1), (1, 0.5, 3), (0, 0.25, 2)):
        now[0] += seconds
        generation.deliver(EngineOutput("r", index, [9] * count))
    assert gaps == [(1, 4.0), (3, 3.5), (2, 0.75)] and clock.firsts == [1, 2]
