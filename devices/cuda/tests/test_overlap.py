"""When speculative steps overlap on this device: as its attention needs lengths on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.llm import LLM
from sglcore.sampling.params import SamplingParams
from sglcore_cuda import package
from tests.laws.vendor_libraries import *  # noqa: F403
from tests.laws.vendor_libraries import SMALL, attention_of, spoken

pytestmark = pytest.mark.needs("simulator")


SPECULATIVE = {"speculative": "ngram", "draft_tokens": 4, "max_batch_tokens": 128}


def told_of(told: str, topic: str) -> str:
    """Return the ledger's row on a topic."""
    (row,) = (line for line in told.splitlines() if line.startswith(f"{topic}: "))
    return row


@pytest.mark.parametrize("named", ["triton", "flash_attention", "gathered"])
def test_speculative_steps_overlap_where_attention_needs_no_lengths_on_the_host(model: Path, named: str) -> None:
    for settings in ({}, SPECULATIVE):
        _, told = spoken(model, package.name, attention_backend=named, **settings)
        assert told_of(told, "overlap").startswith("overlap: on: steps are planned while the device runs")


def test_attention_that_takes_exact_lengths_alone_is_refused_for_speculation(model: Path) -> None:
    _, told = spoken(model, package.name)
    assert attention_of(told) == "flashinfer" and told_of(told, "overlap").startswith("overlap: on: ")
    _, told = spoken(model, package.name, **SPECULATIVE)
    assert attention_of(told) != "flashinfer" and told_of(told, "overlap").startswith("overlap: on: ")
    assert "flashinfer refused: upper bounds of lengths on the host, which speculation gives" in told
    with pytest.raises(ConfigError, match="flashinfer refused: upper bounds of lengths on the host"):
        spoken(model, package.name, attention_backend="flashinfer", **SPECULATIVE)


def test_the_text_is_the_same_with_draft_tokens_beyond_a_page_and_up_to_the_last(model: Path) -> None:
    prompts = [[7, 8, 9, 10] * 10, [3, 5] * 21]
    texts = [answers(model, prompts, **settings) for settings in ({}, SPECULATIVE)]
    assert texts[0] == texts[1] and [len(text) for text in texts[0]] == [24, 24]


def answers(model: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """Return the greedy tokens of several requests at once."""
    with LLM(str(model), device=package.name, **{**SMALL, "max_batch_tokens": 128, **settings}) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    return [list(output.outputs[0].token_ids) for output in outputs]
