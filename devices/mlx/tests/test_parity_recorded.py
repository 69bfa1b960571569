"""Tests that the embedded model's greedy and sampled texts equal those recorded from the CPU
device; without torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from devices.mlx.tests import record
from sglcore.engine.llm import LLM

TOLERANCE = 1e-3
"""Tolerance in nats of float32 log-probabilities that were rounded to five digits."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="mlx", dtype="float32", graph="off", max_requests=8) as made:
        yield made


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[list[record.Answer]]]:
    return record.read()


def test_greedy_texts_of_200_tokens_are_those_recorded(
    llm: LLM, recorded: dict[str, list[list[record.Answer]]]
) -> None:
    assert all(len(answer.token_ids) == record.TOKENS for (answer,) in recorded["greedy"])
    assert not record.differences(record.answer(llm, record.greedy()), recorded["greedy"], TOLERANCE)


def test_equal_seeds_draw_the_recorded_texts(llm: LLM, recorded: dict[str, list[list[record.Answer]]]) -> None:
    assert not record.differences(record.answer(llm, record.sampled()), recorded["sampled"], TOLERANCE)


def test_a_seeded_text_drawn_alone_is_the_one_drawn_among_others(
    llm: LLM, recorded: dict[str, list[list[record.Answer]]]
) -> None:
    questions = record.sampled()
    for place in (2, 7, len(questions) - 1):
        alone = record.answer(llm, [questions[place]])
        assert not record.differences(alone, [recorded["sampled"][place]], TOLERANCE)


def test_a_differing_text_token_or_log_probability_is_told(recorded: dict[str, list[list[record.Answer]]]) -> None:
    one = recorded["greedy"][0][0]
    others = {
        "token 3 is": record.Answer(one.text, [*one.token_ids[:3], 5, *one.token_ids[4:]], one.logprobs, one.finish),
        "of token 1 differs": record.Answer(one.text, one.token_ids, [0.0, 0.0, *one.logprobs[2:]], one.finish),
        "wanted": record.Answer(one.text[:-1], one.token_ids, one.logprobs, one.finish),
    }
    for told, other in others.items():
        assert any(told in reason for reason in record.differences([[other]], [[one]], TOLERANCE))
    assert not record.differences([[one]], [[one]], TOLERANCE)
