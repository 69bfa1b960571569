"""A prompt's samples as text: what has ended stays as it ended, and says why."""

from __future__ import annotations

from sglcore.engine.output_processor import OutputProcessor
from sglcore.engine.start import embedded_model
from sglcore.engine.text import TextCodec
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.output import EngineOutput

CODEC = TextCodec(embedded_model())


def processor(**given: object) -> OutputProcessor:
    """Of two samples."""
    params = SamplingParams(n=2, **given)  # pyright: ignore[reportArgumentType]
    return OutputProcessor(CODEC, "r", "a", CODEC.encode("a", special=False), params, 0)


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
