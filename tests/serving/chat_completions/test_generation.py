"""A running generation: its counts, and that an engine's replies do not block the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import zmq.asyncio

from sglcore.core.errors import ConfigError
from sglcore.engine.output_processor import OutputProcessor
from sglcore.engine.outputs import PromptProgress, TextDelta
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import EngineOutput, FinishReason, TokenLogprob
from sglcore.serving.replicas.channel import EngineChannel, FrontendChannel
from sglcore.serving.replicas.ipc import (
    Abort,
    Address,
    EngineRequest,
    EngineStats,
    GenerateRequest,
    Stop,
    pack_ids,
    pack_params,
)
from sglcore.serving.replicas.prompt_generation import Generation, joined
from sglcore.serving.replicas.server_errors import InvalidRequest, Overloaded, failure

REPORTS = 200


@dataclass
class KeptClock:
    """Records its calls."""

    firsts: list[int] = field(default_factory=list)
    restarts: int = 0
    prompt: tuple[int, int] = (0, 0)
    gaps: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def on_prompt(self, tokens: int, cached: int) -> None:
        self.prompt = (tokens, cached)

    def on_first_tokens(self, count: int) -> None:
        self.firsts.append(count)

    def on_tokens(self, count: int, seconds: float) -> None:
        self.gaps.append(count)

    def on_restart(self) -> None:
        self.restarts += 1

    def on_end(self, reason: str) -> None:
        self.ends.append(reason)


def make(clock: KeptClock, params: SamplingParams) -> Generation:
    """A request with a prompt of two tokens, not assigned to an engine."""
    processor = OutputProcessor(TextCodec(embedded_model()), "r", None, [5, 6], params, 0)
    return Generation(GenerateRequest("r", pack_ids([5, 6]), pack_params(params), 0), processor, cast(Any, clock))


def test_the_time_between_tokens_is_that_of_one_sample_whoever_came_between() -> None:
    clock = KeptClock()
    generation = make(clock, SamplingParams(n=3, max_tokens=3))
    for step in range(3):
        for index in range(3):
            generation.deliver(EngineOutput("r", index, [9] * (1 + step), "length" if step == 2 else None))
    assert (clock.firsts, clock.gaps, clock.ends) == ([1] * 3, [2] * 3 + [3] * 3, ["length"])


def test_all_tokens_of_a_samples_first_output_are_counted() -> None:
    clock = KeptClock()
    generation = make(clock, SamplingParams(max_tokens=5))
    generation.deliver(EngineOutput("r", 0, [9, 9, 9]))
    generation.deliver(EngineOutput("r", 0, [9, 9], "length"))
    assert (clock.firsts, clock.gaps) == ([3], [2])


def test_what_nobody_took_in_time_is_one_delta_with_the_log_probabilities_of_all_its_tokens() -> None:
    generation = make(KeptClock(), SamplingParams(n=2, max_tokens=4, logprobs=1))
    for token_id in (9, 10, 11):
        for index in range(2):
            scores = [TokenLogprob(token_id + index, -1.0, 1, ((token_id + index, -1.0),))]
            reason = "length" if token_id == 11 else None
            generation.deliver(EngineOutput("r", index, [token_id + index], reason, logprobs=scores))

    async def taken() -> list[TextDelta]:
        return [delta async for delta in generation if isinstance(delta, TextDelta)]

    deltas = asyncio.run(taken())
    assert [(delta.index, delta.token_ids, delta.finish_reason) for delta in deltas] == [
        (0, (9, 10, 11), "length"),
        (1, (10, 11, 12), "length"),
    ]
    for delta, completion in zip(deltas, generation.output.outputs, strict=True):
        assert delta.logprobs is not None and [each.token_id for each in delta.logprobs] == list(delta.token_ids)
        assert list(delta.logprobs) == completion.logprobs and delta.text == completion.text


@pytest.mark.parametrize("runs", [[1] * 8, [8], [3, 5], [1, 6, 1]])
def test_a_stop_string_within_a_run_ends_the_sample_at_the_token_that_completes_it(runs: list[int]) -> None:
    codec, sent, told = TextCodec(embedded_model()), list[EngineRequest](), []
    ids = codec.encode("a b.c a b.c d e", special=False)[:8]
    clock = KeptClock()
    generation = make(clock, SamplingParams(stop=(".c",), logprobs=0, include_stop_str_in_output=True))
    generation.bind(sent.append, told.append)
    for count in runs:
        run, ids = ids[:count], ids[count:]
        scores = [TokenLogprob(token_id, -1.0, 1) for token_id in run]
        generation.deliver(EngineOutput("r", 0, run, logprobs=scores))

    async def taken() -> list[TextDelta]:
        return [delta async for delta in generation if isinstance(delta, TextDelta)]

    (delta,), (completion,) = asyncio.run(taken()), generation.output.outputs
    assert (delta.text, delta.finish_reason, completion.stop_cause) == ("a b.c", "stop", ".c")
    assert codec.decode(delta.token_ids) == completion.text == delta.text
    assert list(delta.token_ids) == completion.token_ids == [score.token_id for score in delta.logprobs or ()]
    assert sent == [Stop("r", 0, ".c")] and told == [generation] and clock.ends == ["stop"]


@pytest.mark.parametrize("seconds, kind", [(0.0, InvalidRequest), (10.0, Overloaded)])
def test_what_others_kept_from_running_is_told_when_to_come_again(seconds: float, kind: type[Exception]) -> None:
    generation = make(KeptClock(), SamplingParams())
    generation.deliver(EngineOutput("r", 0, [], "error", error="much to do", refused=True, retry_after=seconds))
    with pytest.raises(kind, match="much to do") as raised:
        asyncio.run(generation.wait())
    found = failure(raised.value)
    assert found is not None and found.status == (429 if seconds else 400)
    assert found.headers.get("retry-after") == ("10" if seconds else None)


def test_however_many_reports_wait_others_have_their_turn_between_two_of_them(tmp_path: Path) -> None:
    async def play() -> None:
        context = zmq.asyncio.Context()
        frontend = FrontendChannel(context, f"ipc://{tmp_path}/e")
        engine = EngineChannel(Address(frontend.endpoint))
        for count in range(REPORTS):
            engine.send(EngineStats(steps=count))
        engine.close()
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        for count in range(REPORTS):
            reply = await frontend.receive()
            assert isinstance(reply, EngineStats) and reply.steps == count
        assert turns >= REPORTS
        task.cancel()
        frontend.close()
        context.destroy(linger=0)

    asyncio.run(play())


def test_a_channel_that_can_not_be_opened_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    async def play() -> None:
        context = zmq.asyncio.Context()
        with pytest.raises(ConfigError, match="TMPDIR"):
            FrontendChannel(context, f"ipc://{tmp_path}/{'x' * 120}")
        with pytest.raises(ConfigError, match="ulimit"):
            FrontendChannel(context, f"ipc://{tmp_path}/no/such/folder")
        context.destroy(linger=0)

    asyncio.run(play())


def test_what_has_ended_can_not_fail_any_more() -> None:
    async def play() -> None:
        clock = KeptClock()
        generation = make(clock, SamplingParams(max_tokens=1))
        generation.deliver(EngineOutput("r", 0, [9], "length"))
        generation.fail(RuntimeError("too late"))
        generation.abort()
        assert (await generation.wait()).outputs[0].finish_reason == "length" and clock.ends == ["length"]

    asyncio.run(play())


def test_what_is_begun_again_repeats_no_word_and_no_time() -> None:
    async def play() -> None:
        clock = KeptClock()
        generation = make(clock, SamplingParams(max_tokens=2, logprobs=0))
        generation.deliver(EngineOutput("r", 0, [9], cached_tokens=1))
        generation.restart()
        assert generation.output.cached_tokens == 0
        generation.deliver(EngineOutput("r", 0, [9], cached_tokens=2))
        generation.deliver(EngineOutput("r", 0, [10], "length"))
        deltas = [delta async for delta in generation if isinstance(delta, TextDelta)]
        assert [delta.token_ids for delta in deltas] == [(9, 10)]
        assert (clock.firsts, clock.restarts, clock.gaps, clock.prompt) == ([1, 1], 1, [1], (2, 2))

    asyncio.run(play())


def test_progress_wakes_who_waits_for_it() -> None:
    async def play() -> None:
        generation = make(KeptClock(), SamplingParams(max_tokens=2))
        waiting = asyncio.ensure_future(anext(generation))
        await asyncio.sleep(0)
        generation.deliver(EngineOutput("r", 0, cached_tokens=0, processed=1))
        assert await asyncio.wait_for(waiting, 60) == PromptProgress("r", 2, 0, 1)

    asyncio.run(play())


def test_progress_does_not_go_back_where_a_prompt_is_computed_again() -> None:
    async def play() -> None:
        generation = make(KeptClock(), SamplingParams(max_tokens=2))
        for processed in (0, 1, 2):
            generation.deliver(EngineOutput("r", 0, cached_tokens=0, processed=processed))
            told = asyncio.ensure_future(anext(generation))
            await asyncio.sleep(0)
            assert told.done() and told.result() == PromptProgress("r", 2, 0, processed)
        for processed in (0, 1, 2):
            generation.deliver(EngineOutput("r", 0, cached_tokens=0, processed=processed))
        generation.deliver(EngineOutput("r", 0, [9], "length"))
        assert [type(item) for item in [each async for each in generation]] == [TextDelta]

    asyncio.run(play())


@pytest.mark.parametrize("is_told", [False, True])
def test_an_abort_tells_the_end_of_each_sample_once_there_was_something_to_tell(is_told: bool) -> None:
    async def play() -> None:
        clock = KeptClock()
        generation = make(clock, SamplingParams(n=2, max_tokens=2))
        if is_told:
            generation.deliver(EngineOutput("r", 0, [9], "length"))
        generation.abort()
        ends = {delta.index: delta.finish_reason async for delta in generation if isinstance(delta, TextDelta)}
        assert ends == ({0: "length", 1: "abort"} if is_told else {})
        assert [each.finish_reason for each in generation.output.outputs] == ["length" if is_told else "abort", "abort"]
        assert clock.ends == ["abort"]

    asyncio.run(play())


def test_a_sample_that_fails_before_its_first_token_has_no_time_to_it() -> None:
    clock = KeptClock()
    generation = make(clock, SamplingParams(max_tokens=2))
    generation.deliver(EngineOutput("r", 0, [], "error", error="planted"))
    assert (clock.firsts, clock.gaps, clock.ends) == ([], [], ["error"])


def test_joined_deltas_end_as_the_last_and_have_the_log_probabilities_of_those_that_have_some() -> None:
    first, second = TextDelta("r", 1, "a", (5,)), TextDelta("r", 1, "b", (6, 7))
    last = TextDelta("r", 1, "", (), "error", None, "planted")
    assert joined([first]) is first
    assert joined([first, second]) == TextDelta("r", 1, "ab", (5, 6, 7))
    assert joined([first, second, last]) == TextDelta("r", 1, "ab", (5, 6, 7), "error", None, "planted")
    scores = tuple(TokenLogprob(token, -0.5, 1, ()) for token in (6, 7))
    scored = TextDelta("r", 1, "b", (6, 7), None, scores)
    assert joined([first, scored, last]).logprobs == scores and joined([scored, first]).logprobs == scores


@pytest.mark.parametrize(
    ("reasons", "counted"),
    [
        (("stop", "length", "length"), "stop"),
        (("length", "stop", "stop"), "length"),
        (("stop", "abort", "length"), "abort"),
        (("length", "abort", "error"), "error"),
        (("error", "stop", "abort"), "error"),
    ],
)
def test_a_request_counts_as_failed_or_aborted_if_one_of_its_samples_is(
    reasons: tuple[FinishReason, ...], counted: str
) -> None:
    clock = KeptClock()
    generation = make(clock, SamplingParams(n=3, max_tokens=2))
    for index, reason in enumerate(reasons):
        generation.deliver(EngineOutput("r", index, [9], reason, error="planted" if reason == "error" else ""))
    assert clock.ends == [counted]


def test_what_comes_after_the_end_changes_nothing() -> None:
    clock, sent, told, closed = KeptClock(), list[EngineRequest](), list[Generation](), list[str]()
    generation = make(clock, SamplingParams(max_tokens=9))
    generation.bind(sent.append, told.append)
    generation.when_closed(lambda: closed.append("closed"))
    generation.deliver(EngineOutput("r", 0, [9]))
    for _ in range(2):
        generation.abort()
    before = generation.output.outputs[0].text
    for late in (EngineOutput("r", 0, [10], "length"), EngineOutput("r", 0, cached_tokens=0, processed=2)):
        generation.deliver(late)
    sample = generation.output.outputs[0]
    assert (sample.text, sample.token_ids, sample.finish_reason) == (before, [9], "abort")
    assert (sent, told, closed, clock.ends) == ([Abort("r")], [generation], ["closed"], ["abort"])

    async def rest() -> list[type[object]]:
        return [type(item) async for item in generation]

    assert asyncio.run(rest()) == [TextDelta]


@pytest.mark.parametrize("kind", ["refused", "is_unserved"])
def test_a_sample_that_has_begun_ends_alone_though_the_engine_refuses_its_rest(kind: str) -> None:
    clock = KeptClock()
    generation = make(clock, SamplingParams(n=2, max_tokens=2))
    generation.deliver(EngineOutput("r", 1, [9]))
    generation.deliver(EngineOutput("r", 0, [], "error", error="planted", **{kind: True}))  # pyright: ignore
    assert not generation.is_closed and not generation.is_over
    generation.deliver(EngineOutput("r", 1, [10], "length"))
    first, second = asyncio.run(generation.wait()).outputs
    assert (first.finish_reason, first.error, first.refused) == ("error", "planted", kind == "refused")
    assert (second.finish_reason, second.token_ids) == ("length", [9, 10])


def test_who_follows_a_prompt_is_told_of_its_end_once_with_the_first_token() -> None:
    for follows in (False, True):
        generation = make(KeptClock(), SamplingParams(max_tokens=2))
        generation.request.progress = follows
        told = list[PromptProgress | TextDelta]()
        for token, reason in ((9, None), (10, "length")):
            generation.deliver(EngineOutput("r", 0, [token], reason, cached_tokens=1))  # pyright: ignore
            told.append(asyncio.run(anext(generation)))  # pyright: ignore[reportArgumentType]
        assert (told[0] == PromptProgress("r", 2, 1, 2)) is follows
        assert sum(isinstance(each, PromptProgress) for each in told) == follows


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_token_whose_text_is_held_back_waits_for_it_unless_it_is_scored(logprobs: int | None) -> None:
    codec = TextCodec(embedded_model())
    first, second = codec.encode("a b", special=False)[:2]
    generation = make(KeptClock(), SamplingParams(stop=("a c",), logprobs=logprobs, max_tokens=4))

    def deliver(token: int) -> None:
        scores = None if logprobs is None else [TokenLogprob(token, -1.0, 1)]
        generation.deliver(EngineOutput("r", 0, [token], logprobs=scores))

    async def play() -> None:
        deliver(first)
        reading = asyncio.ensure_future(anext(generation))
        await asyncio.sleep(0)
        assert reading.done() is (logprobs is not None) is generation.is_told
        deliver(second)
        found = [await reading] if logprobs is None else [await reading, await anext(generation)]
        assert "".join(each.text for each in found if isinstance(each, TextDelta)) == "a b"

    asyncio.run(play())
