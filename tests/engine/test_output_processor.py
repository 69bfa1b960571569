"""A prompt's samples as text: an ended sample does not change and states its reason; tokens in runs
give the same result as single tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import repeat
from random import Random

import numpy as np
import pytest

from sglcore.engine.output_processor import EarlyEnd, OutputProcessor
from sglcore.engine.outputs import Completion, TextDelta
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.detokenizer import IncrementalDetokenizer
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import EngineOutput, FinishReason, TokenLogprob

CODEC = TextCodec(embedded_model())


def processor(**given: object) -> OutputProcessor:
    """An output processor for two samples."""
    params = SamplingParams(n=2, **given)  # pyright: ignore[reportArgumentType]
    return OutputProcessor(CODEC, "r", "a", CODEC.encode("a", special=False), params, 0)


def test_a_text_is_made_by_all_parameters_that_are_about_it() -> None:
    class Told(TextCodec):
        def detokenizer(self, stop: Sequence[str], **how: object) -> IncrementalDetokenizer:
            told.append((tuple(stop), how))
            return super().detokenizer(stop, **how)

    told: list[tuple[tuple[str, ...], dict[str, object]]] = []
    params = SamplingParams(
        stop=("c",), stop_regex=("d",), min_tokens=3, skip_special_tokens=False, include_stop_str_in_output=True, n=2
    )
    OutputProcessor(Told(embedded_model()), "r", "a", [5, 6], params, 0)
    known = {"skip_special": False, "include_stop": True, "prompt": [5, 6], "min_tokens": 3, "patterns": ("d",)}
    assert told == [(("c",), known)] * 2
    given = signature(IncrementalDetokenizer).parameters.values()
    assert known.keys() == {each.name for each in given if each.kind is each.KEYWORD_ONLY}


@pytest.mark.parametrize("least", [0, 2, 9])
def test_what_the_first_tokens_complete_is_no_end(least: int) -> None:
    ids = CODEC.encode("a c b c", special=False)
    for words in ({"stop": ["c"]}, {"stop_regex": ["c"]}):
        samples = processor(min_tokens=least, **words)
        for token_id in ids:
            samples.take(EngineOutput("r", 0, token_ids=[token_id]))
        samples.take(EngineOutput("r", 0, finish_reason="length"))
        text = samples.output.outputs[0].text
        assert text.count("c") == {0: 0, 2: 1, 9: 2}[least], (words, text)


def test_what_comes_of_a_sample_after_its_stop_string_changes_nothing() -> None:
    samples = processor(stop=["c"])
    ids = CODEC.encode("a b c", special=False)
    last = samples.take(EngineOutput("r", 0, token_ids=ids))
    assert last is not None and (last.finish_reason, samples.output.outputs[0].stop_cause) == ("stop", "c")
    assert samples.take(EngineOutput("r", 0, token_ids=ids, finish_reason="length")) is None
    ended, other = samples.output.outputs
    assert (ended.token_ids, ended.text, ended.finish_reason) == (ids, last.text, "stop")
    assert other.finish_reason is None and samples.take(EngineOutput("r", 1, token_ids=ids)) is not None


def test_a_sample_that_ends_by_an_error_says_which() -> None:
    samples = processor()
    delta = samples.take(EngineOutput("r", 1, finish_reason="error", error="the step failed"))
    assert delta is not None and (delta.finish_reason, delta.error) == ("error", "the step failed")
    assert [each.error for each in samples.output.outputs] == ["", "the step failed"]


def scores(*ids: int) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, -1.0, 1) for token_id in ids]


def test_a_prompts_scores_are_taken_once_though_every_sample_brings_them() -> None:
    samples = processor(prompt_logprobs=0)
    for index in (0, 1, 1):
        samples.take(EngineOutput("r", index, [5], prompt_logprobs=scores(7, 8)))
    assert samples.output.prompt_logprobs == [None, *scores(7, 8)]


def test_accepted_tokens_are_those_beside_the_one_that_each_step_brings() -> None:
    samples = processor()
    for ids, proposed in (([5], -1), ([5, 6, 7], 4), ([5], 4), ([], 4), ([6, 7], 1), ([5], 0)):
        samples.take(EngineOutput("r", 0, ids, proposed=proposed))
    found = samples.output.outputs[0]
    assert (found.verified_steps, found.proposed_tokens, found.accepted_tokens) == (4, 9, 3)


def test_cached_tokens_of_a_prompt_are_the_most_that_a_sample_had() -> None:
    samples = processor()
    for index, cached, known in ((1, -1, 0), (0, 3, 3), (0, -1, 3), (1, 8, 8), (1, -1, 8), (0, 5, 8)):
        samples.take(EngineOutput("r", index, [5], cached_tokens=cached))
        assert samples.output.cached_tokens == known


def test_from_the_first_token_on_again_nothing_is_left_of_what_was_taken() -> None:
    samples = processor(prompt_logprobs=0, logprobs=0, stop=["c"])
    fresh = processor(prompt_logprobs=0, logprobs=0, stop=["c"])
    ids = CODEC.encode("a b c", special=False)
    samples.take(EngineOutput("r", 0, ids, logprobs=scores(*ids), prompt_logprobs=scores(7), cached_tokens=9))
    samples.take(EngineOutput("r", 1, ids[:2], logprobs=scores(*ids[:2]), proposed=3))
    samples.restart()
    assert samples.output == fresh.output
    later = EngineOutput("r", 1, ids, logprobs=scores(*ids), prompt_logprobs=scores(8), cached_tokens=2)
    assert samples.take(later) == fresh.take(later) and samples.output == fresh.output


def states(*values: float) -> dict[str, object]:
    """The fields of an output with states of two elements."""
    return {"hidden_states": np.repeat(np.array(values, "<f4"), 2).tobytes(), "hidden_size": 2}


@pytest.mark.parametrize(("kind", "wanted"), [("all", [1, 2, 3, 4, 5]), ("last", [5])])
def test_states_begin_again_with_the_tokens_and_end_with_them(kind: str, wanted: list[float]) -> None:
    samples = processor(return_hidden_states=kind, stop=["c"])
    ids = CODEC.encode("a b c d", special=False)
    prompt = () if kind == "last" else (1.0, 2.0)
    cut = list(ids[:-1])
    for _ in range(2):
        samples.take(EngineOutput("r", 0, cut[:1], **states(*prompt, 3)))  # pyright: ignore[reportArgumentType]
        samples.restart()
    for token, value in zip(cut[:-1], (3, 4), strict=False):
        samples.take(EngineOutput("r", 0, [token], **states(*(prompt if value == 3 else ()), value)))  # pyright: ignore[reportArgumentType]
    delta = samples.take(EngineOutput("r", 0, ids[len(cut) - 1 :], **states(5, 6)))  # pyright: ignore[reportArgumentType]
    found = samples.output.outputs[0]
    assert found.finish_reason == "stop" and len(found.token_ids) == len(cut) == 3
    assert found.hidden_states is not None and found.hidden_states.tolist() == [[value, value] for value in wanted]
    assert delta is not None and delta.hidden_states is not None and delta.hidden_states.tolist() == [[5, 5]]


@pytest.mark.parametrize("stops", [False, True])
def test_a_text_that_stops_before_its_sample_is_refused_is_not(stops: bool) -> None:
    samples = processor(stop=["c"] if stops else [])
    ids = CODEC.encode("a b c", special=False)
    samples.take(EngineOutput("r", 0, ids, finish_reason="error", error="no such token", refused=True))
    found = samples.output.outputs[0]
    wanted = ("stop", "", False) if stops else ("error", "no such token", True)
    assert (found.finish_reason, found.error, found.refused) == wanted


@pytest.mark.parametrize("stops", ["by its text", "by its tokens", "not"])
def test_a_sample_is_ended_early_only_where_its_text_ends_before_its_tokens(stops: str) -> None:
    samples = processor(stop=["c"] if stops == "by its text" else [])
    ids = CODEC.encode("a b c", special=False)
    last = EngineOutput("r", 1, ids)
    if stops == "by its tokens":
        last.finish_reason, last.stop_cause = "stop", ids[-1]
    samples.take(last)
    assert samples.early_end(last) == (EarlyEnd(1, "c") if stops == "by its text" else None)
    if stops == "by its text":
        last.finish_reason = "length"
        assert samples.early_end(last) is None, "its tokens have ended too"


def test_a_text_that_can_not_be_made_ends_its_sample_with_the_reason_and_no_other() -> None:
    class Broken(IncrementalDetokenizer):
        def push(self, ids: Sequence[int]) -> str:
            raise LookupError("no such token: 7")

    samples = processor()
    ids = CODEC.encode("a b", special=False)
    samples._texts[1].__class__ = Broken
    output = EngineOutput("r", 1, ids)
    reason = "its tokens cannot be decoded to text: LookupError: no such token: 7"
    assert samples.take(output) == TextDelta("r", 1, "", (), "error", error=reason)
    assert samples.early_end(output) == EarlyEnd(1, None)
    other, ended = samples.output.outputs
    assert (ended.finish_reason, ended.error, ended.text) == ("error", reason, "") and not ended.refused
    assert samples.take(output) is None and samples.take(EngineOutput("r", 0, ids)) is not None
    assert other.text == "a b" and other.finish_reason is None


@pytest.mark.parametrize("seed", [0, 9])
def test_each_sample_has_its_number_and_the_seed_of_the_request(seed: int) -> None:
    samples = OutputProcessor(CODEC, "r", "a", [5], SamplingParams(n=3), seed)
    for _ in range(2):
        assert [(each.index, each.seed) for each in samples.output.outputs] == [(n, seed) for n in range(3)]
        samples.restart()


@dataclass
class Sample:
    """The tokens of one sample and its end: "stop" and "length" come with the last token, other
    reasons after it."""

    ids: list[int]
    reason: FinishReason | None
    params: SamplingParams

    def outputs(self, sizes: Iterator[int]) -> list[EngineOutput]:
        """Return the sample's tokens in runs of these sizes."""
        found, place = list[EngineOutput](), 0
        while place < len(self.ids):
            run = self.ids[place : place + next(sizes)]
            scores = [TokenLogprob(token_id, -1.0, place + index) for index, token_id in enumerate(run)]
            found.append(EngineOutput("r", 0, run, logprobs=scores))
            place += len(run)
        return found

    def end(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Put the sample's end, if it has one, into the last output."""
        last = outputs[-1]
        last.finish_reason, last.error = self.reason, "it failed" if self.reason == "error" else ""
        last.stop_cause = self.ids[-1] if self.reason == "stop" else None
        return outputs

    def single(self) -> list[EngineOutput]:
        """Return the outputs of one token per step."""
        outputs = self.outputs(repeat(1))
        return self.end([*outputs, EngineOutput("r", 0)] if self.reason in ("error", "abort") else outputs)


IDS = [*CODEC.encode("a b.c é🙂", special=False), *sorted(CODEC.special_ids)[:1]]


def draw_sample(rnd: Random) -> Sample:
    """Draw a sample with few letters, so that stop strings occur in it."""
    stop = ["".join(rnd.choices("abc. é", k=rnd.randint(1, 3))) for _ in range(rnd.choice([0, 1, 2]))]
    params = SamplingParams(
        stop=tuple(stop),
        include_stop_str_in_output=rnd.random() < 0.5,
        skip_special_tokens=rnd.random() < 0.5,
        logprobs=rnd.choice([None, 0]),
    )
    reasons: tuple[FinishReason | None, ...] = (None, "stop", "length", "error", "abort")
    return Sample(rnd.choices(IDS, k=rnd.randint(1, 16)), rnd.choice(reasons), params)


def told(
    sample: Sample, outputs: list[EngineOutput], plant: Callable[[OutputProcessor], None]
) -> tuple[Completion, list[TextDelta]]:
    """Return the completion, and the deltas emitted while it grew."""
    processor = OutputProcessor(CODEC, "r", None, [5], sample.params, 0)
    plant(processor)
    deltas = [delta for output in outputs if (delta := processor.take(output)) is not None]
    return processor.output.outputs[0], deltas


def check_runs(rnd: Random, plant: Callable[[OutputProcessor], None] = lambda processor: None) -> bool:
    """For any sizes of runs, a sample equals that of one token per step. Returns true if a stop
    string was in it."""
    sample = draw_sample(rnd)
    wanted, steps = told(sample, sample.single(), lambda processor: None)
    found, deltas = told(sample, sample.end(sample.outputs(iter(lambda: rnd.randint(1, 5), 0))), plant)
    assert found == wanted
    for grown in (steps, deltas):
        assert "".join(delta.text for delta in grown) == found.text
        assert [token_id for delta in grown for token_id in delta.token_ids] == found.token_ids
        scores = [score for delta in grown for score in delta.logprobs or ()]
        assert scores == (found.logprobs or []) and len(scores) in (0, len(found.token_ids))
        assert (grown[-1].finish_reason, grown[-1].error) == (found.finish_reason, found.error)
    return isinstance(found.stop_cause, str)


def test_tokens_in_runs_make_the_same_completion_as_one_after_the_other() -> None:
    assert sum(check_runs(Random(seed)) for seed in range(300)) > 30


class TakesTheWholeRun(IncrementalDetokenizer):
    def push(self, ids: Sequence[int]) -> str:
        shown = super().push(ids)
        self.taken = len(ids)
        return shown


class TakesOneTokenLess(IncrementalDetokenizer):
    def push(self, ids: Sequence[int]) -> str:
        shown = super().push(ids)
        self.taken -= 1
        return shown


class CountsWhatIsShown(IncrementalDetokenizer):
    def push(self, ids: Sequence[int]) -> str:
        shown = super().push(ids)
        self.taken = sum(token_id not in self._skipped for token_id in ids[: self.taken])
        return shown


class KeepsTheScoresOfTheRun(OutputProcessor):
    def _take_tokens(self, completion, ids, logprobs):
        found = super()._take_tokens(completion, ids, logprobs)
        return found if found is None else tuple(logprobs or ())


class TellsWhatCameAfterTheStopString(OutputProcessor):
    def _end(self, completion: Completion, text: IncrementalDetokenizer, output: EngineOutput) -> None:
        super()._end(completion, text, output)
        completion.error = output.error


class IsNotStoppedByTheRunsEnd(OutputProcessor):
    def _end(self, completion: Completion, text: IncrementalDetokenizer, output: EngineOutput) -> None:
        super()._end(completion, text, output)
        completion.finish_reason = output.finish_reason or completion.finish_reason


@pytest.mark.parametrize(
    "kind",
    [
        TakesTheWholeRun,
        TakesOneTokenLess,
        CountsWhatIsShown,
        KeepsTheScoresOfTheRun,
        TellsWhatCameAfterTheStopString,
        IsNotStoppedByTheRunsEnd,
    ],
)
def test_a_planted_bug_is_caught_by_some_run(kind: type) -> None:
    def plant(processor: OutputProcessor) -> None:
        if issubclass(kind, OutputProcessor):
            processor.__class__ = kind
        for text in processor._texts:
            if issubclass(kind, IncrementalDetokenizer):
                text.__class__ = kind

    with pytest.raises(AssertionError):
        for seed in range(300):
            check_runs(Random(seed), plant)
