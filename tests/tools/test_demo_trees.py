"""Draft trees of the shipped heads give at least the tokens per step of chains with the same number
of forwards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from sglcore import LLM
from sglcore.runtime.speculative import tree, tree_drafts
from tests.planted import planted
from tools.demo.acceptance import asked, held_out

FOLDER = Path(__file__).resolve().parents[2] / "sglcore" / "assets" / "demo"
PROMPTS, WRITTEN, DEPTH = 12, 48, 4
CHAIN: Mapping[str, Any] = {"draft_tokens": DEPTH}
TREE: Mapping[str, Any] = {"draft_tokens": 15, "draft_width": 4, "draft_depth": DEPTH}


def steps(kind: str, shape: Mapping[str, Any]) -> int:
    """The number of verifications that greedy texts took."""
    prompts = [*held_out(Tokenizer.from_file(str(FOLDER / "tokenizer.json")), PROMPTS).values()]
    with LLM(device="cpu", threads=1, speculative=kind, max_requests=PROMPTS, **shape) as llm:
        return sum(each.outputs[0].verified_steps for each in llm.generate(prompts, asked(PROMPTS, 0.0, WRITTEN)))


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_greedy_tree_takes_fewer_steps_than_a_chain(kind: str) -> None:
    assert steps(kind, TREE) < steps(kind, CHAIN)


def test_a_tree_of_what_is_least_likely_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    least = planted(tree, "tree_build(self.numbers, self.sums, ", "tree_build(self.numbers, -self.sums, ")
    monkeypatch.setattr(tree_drafts, "TreeRecords", least.TreeRecords)
    assert steps("mtp", TREE) > steps("mtp", CHAIN)
