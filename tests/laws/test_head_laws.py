"""Proposals of several layers, a token each, in whole engines: every one is drawn of what dense torch gives on the text that came
out, whatever was accepted before, and none changes a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.device.errors import ConfigError
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.heads import MultiHeadDrafter, Window
from sglcore.schedule.request import Request
from tests.checkpoints import llama
from tests.drafts import TARGET, DenseHeads, next_tokens
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.test_draft_laws import TOLERANCE, features_of
from tests.laws.test_speculative_laws import CONTEXT, PROMPTS, SAMPLING, TOKENS, VOCABULARY, Ran, check_same
from tests.laws.test_speculative_laws import run as run_texts

HEADS = 3
OTHERS = [[*prompt[: max(3, len(prompt) - 3)], 3, 4] for prompt in PROMPTS]
"""Prompts that begin as the first ones."""


class Made(NamedTuple):
    """A target, its folder, the layers in it that propose, and the texts of both kinds of prompts without proposals."""

    target: Any
    folder: Path
    dense: DenseHeads
    plain: tuple[Ran, Ran]


class Drawn(NamedTuple):
    """What the proposals of a text were drawn of: its number, its cells, log-probabilities [tokens, vocab], proposals."""

    text: int
    cells: int
    logprobs: Tensor
    proposals: list[int]


class Steered:
    """A drafter that remembers what it drew, and then proposes the right tokens as often as chance has it, so that any number of
    proposals is accepted."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.steps: list[Drawn] = []
        self.accepts: set[int] = set()
        self._random = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, requests: list[Request], texts: list[list[int]]) -> None:
        """Of these requests, whose texts will be these."""
        self.requests, self.texts = requests, texts
        self.steps.clear()

    def advance(self, rows: DraftRows) -> Tensor:
        drawn: list[Tensor] = []
        draw = rows.draw

        def remember(logits: Tensor, depth: int) -> Tensor:
            drawn.append(torch.log_softmax(logits.cpu(), -1))
            return draw(logits, depth)

        rows.draw = remember
        found = self.inner.advance(rows)
        if not drawn:
            return found
        texts, steered = {request.slot: index for index, request in enumerate(self.requests)}, found.tolist()
        for row, (slot, cells) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            self.steps.append(Drawn(texts[slot], cells, torch.stack([each[row] for each in drawn]), steered[row]))
            right = self.texts[texts[slot]][cells + 1 :][: self._random.integers(HEADS + 1)]
            steered[row] = [*right, *((each + 1) % VOCABULARY for each in steered[row][len(right) :])]
        return torch.tensor(steered, dtype=torch.int32).to(found.device)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    target = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    folder = tmp_path_factory.mktemp("heads")
    dense = next_tokens(target, folder, llama, HEADS)
    engine = TokenEngine(folder, graph="off")
    try:
        return Made(target, folder, dense, (run_texts(engine), run_texts(engine, OTHERS)))
    finally:
        engine.worker.close()


def furthest(made: Made, texts: list[list[int]], steps: Sequence[Drawn]) -> float:
    """The largest difference of log-probabilities. A step behind the end of a text goes on with what nobody sees."""
    features, before, worst = [features_of(made.target, text, "mtp") for text in texts], [0] * len(texts), 0.0
    accepts = set()
    for text, cells, logprobs, proposals in steps:
        if not before[text] < cells < len(texts[text]):
            continue
        accepts |= {cells - before[text] - 1} if before[text] else set()
        before[text] = cells
        known = texts[text][1 : cells + 1]
        wanted = made.dense.propose(known, features[text][:cells], proposals[: len(logprobs) - 1])
        worst = max(worst, float((logprobs - wanted).abs().max()))
    assert min(before) and accepts == set(range(HEADS + 1))
    return worst


def difference(made: Made, check: bool = True, **settings: Any) -> float:
    """Of texts of one engine, some of which begin as others; each text is the one without proposals."""
    given = {"draft_tokens": HEADS, "max_batch_tokens": 16, "scramble_pages": 2, "graph_buckets": (1, 2, 5), **settings}
    engine = TokenEngine(made.folder, speculative="mtp", **given)
    worker: Any = engine.worker
    assert isinstance(worker.drafter, MultiHeadDrafter)
    worker.drafter = steered = Steered(worker.drafter)
    worst = 0.0
    try:
        for prompts, plain in zip((PROMPTS, OTHERS), made.plain, strict=True):
            texts = [prompt + tokens for prompt, tokens in zip(prompts, plain.tokens, strict=True)]
            found = run_texts(engine, prompts, prepare=lambda requests, texts=texts: steered.begin(requests, texts))
            if check:
                check_same(found, plain)
            worst = max(worst, furthest(made, texts, steered.steps))
        assert engine.scheduler.stats().hit_tokens > 0
    finally:
        worker.close()
    return worst


@pytest.mark.parametrize("overlap", [False, True])
def test_proposals_are_drawn_of_what_dense_torch_gives_and_change_no_text(
    made: Made, graph: str, overlap: bool
) -> None:
    assert difference(made, graph=graph, overlap=overlap) < TOLERANCE


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    ("chunk", "page_size"), [(1, 1), (2, 4), (3, 16), (4, 1), (5, 4), (6, 16), (7, 4)], ids=lambda each: str(each)
)
def test_neither_chunks_nor_pages_change_what_they_are_drawn_of(made: Made, chunk: int, page_size: int) -> None:
    given = {"max_batch_tokens": chunk, "page_size": page_size, "overlap": chunk % 2 == 0}
    assert difference(made, graph="off", poison=True, **given) < TOLERANCE
