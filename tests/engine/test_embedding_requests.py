"""Texts that an engine embeds or scores: their limits, how they are read, and that all or none of a
call run."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglcore import PromptEmbeds
from sglcore.engine.core import Engine, embedding_of, prompted
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.text_codec import TextError
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.schedule.fake_worker import make_limits

EMBEDS = {"generates": False, "vocab_size": 2147, "max_model_len": 64, "max_batch_tokens": 16}


class Summing:
    """Embeds a text as the number and the sum of its token ids, and keeps the segments that it was
    given. It fails at the step of number `fails_at`."""

    def __init__(self, limits: Limits, fails_at: int = -1) -> None:
        self.limits, self.fails_at = limits, fails_at
        self.segments: list[Any] = []
        self.steps = 0

    def submit(self, batch: ScheduleBatch) -> Ticket:
        if self.steps == self.fails_at:
            raise RuntimeError("the device is lost")
        self.steps += 1
        self.segments.append(None if batch.token_type_ids is None else batch.token_type_ids.tolist())
        bounds = batch.token_offsets
        rows = [batch.input_ids[begin:end] for begin, end in pairwise(bounds)]
        vectors = np.array([[len(row), row.sum()] for row in rows], np.float32)
        offsets = np.zeros(len(rows) + 1, np.int32)
        none, good = np.zeros(0, np.int32), np.zeros(len(rows), bool)
        return Ticket(batch.step, BatchResult(batch.step, offsets, none, good, embeddings=vectors))

    def collect(self, ticket: Ticket) -> BatchResult:
        assert isinstance(ticket.payload, BatchResult)
        return ticket.payload

    def close(self) -> None: ...


def opened(fails_at: int = -1, **limits: object) -> tuple[Engine, Summing]:
    worker: Any = Summing(make_limits(**{**EMBEDS, **limits}), fails_at)
    return Engine(worker, embedded_model(), overlap=False), worker


PROMPTS = ([5, 6], [7], [8] * 16, [9] * 10)


def test_each_text_has_its_own_vector_in_order_however_many_steps_they_take() -> None:
    engine, worker = opened()
    found = engine.embed(PROMPTS)
    assert [each.tolist() for each in found] == [[len(each), sum(each)] for each in PROMPTS]
    assert worker.steps > 1 and engine.embed([]) == []
    assert [each.tolist() for each in engine.embed(PROMPTS)] == [each.tolist() for each in found]
    engine.close()


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("bad", [[8] * 17, [], b"text"], ids=["long", "empty", "bytes"])
def test_no_text_is_run_if_one_can_not_be_and_that_one_is_named(place: int, bad: Any) -> None:
    engine, worker = opened()
    prompts = [*PROMPTS[:place], bad, *PROMPTS[place:]]
    with pytest.raises(TextError, match=f"^text {place}: "):
        engine.embed(prompts)
    assert not engine.has_work and not worker.steps
    engine.scheduler.audit()
    engine.close()


def test_texts_that_wait_are_dropped_when_a_step_of_their_call_fails() -> None:
    engine, worker = opened(fails_at=1)
    with pytest.raises((RuntimeError, TextError), match="the device is lost"):
        engine.embed([[8] * 16] * 4)
    worker.fails_at = -1
    assert not engine.has_work
    assert [each.tolist() for each in engine.embed([[5, 6]])] == [[2, 11]]
    engine.close()


@pytest.mark.parametrize(("context", "step", "most"), [(64, 16, 16), (16, 64, 16), (16, 16, 16)])
def test_a_text_is_read_up_to_what_one_step_and_the_context_hold(context: int, step: int, most: int) -> None:
    asked: list[Any] = []
    codec: Any = SimpleNamespace(
        encode=lambda text, **how: asked.append(how["most"]) or [5],
        encode_texts=lambda *texts, limit: asked.append((texts, limit)) or ([5, 6], [0, 1]),
        prompted=lambda prompt, name: f"{name} {prompt}",
    )
    engine, worker = opened(max_model_len=context, max_batch_tokens=step)
    engine.codec = codec
    engine.embed(["a"], "query")
    engine.close()
    assert asked == [most] and worker.segments == [None]
    asked.clear()
    engine, worker = opened(max_model_len=context, max_batch_tokens=step, num_labels=2)
    engine.codec = codec
    engine.score([("a", "b")])
    engine.close()
    assert asked == [(("a", "b"), most)] and worker.segments == [[0, 1]]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"generates": True}, "this checkpoint generates text; wanted an encoder.*use generate"),
        ({"num_labels": 3}, "this checkpoint has a classification head; wanted an encoder.*use score"),
    ],
)
def test_a_checkpoint_of_another_kind_embeds_nothing_and_names_what_it_does(limits: dict[str, Any], said: str) -> None:
    engine, worker = opened(**limits)
    with pytest.raises(TextError, match=said):
        engine.embed([[5, 6]])
    assert not worker.steps
    engine.close()


@pytest.mark.parametrize("name", [None, "query"])
def test_embeddings_are_no_text_to_embed(name: str | None) -> None:
    nothing: Any = None
    with pytest.raises(TextError, match="found embeddings as a prompt to embed; wanted text, or a list of token ids"):
        prompted(nothing, PromptEmbeds(np.zeros((2, 4), np.float32)), name)
    assert prompted(nothing, [5, 6], None) == [5, 6]
    with pytest.raises(TextError, match="found token ids with the prompt name ''"):
        prompted(nothing, [5, 6], "")


@pytest.mark.parametrize(("error", "why"), [("no room", "no room"), ("", "it was aborted")])
def test_a_request_without_a_result_says_why(error: str, why: str) -> None:
    request = Request("embed-1", np.array([5], np.int32), SamplingParams(), task="embed")
    request.error = error
    with pytest.raises(TextError, match=f"'embed-1' has no embedding: {why}"):
        embedding_of(request)
    request.embedding = np.zeros(3, np.float32)
    assert embedding_of(request) is request.embedding
