"""What the verifying worker reports about draft tokens to the length controller and to the
statistics, and how it closes its drafter."""

from __future__ import annotations

import random
import time
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.drafter import NONE
from sglcore.runtime.speculative.verify_worker import replace_proposals
from sglcore.schedule.draft_counts import sums_of
from sglcore.schedule.prompt_embeds import PromptEmbeds
from sglcore.schedule.request import Request
from sglcore.step.draft_length import LengthController
from tests.checkpoints import llama, save
from tests.laws.speculation.test_speculative_laws import CONTEXT, VOCABULARY, engines, folder, plain, run
from tests.laws.speculation.texts import TOKENS, Ran, check_same

__all__ = ["engines", "folder", "plain"]


class Told(LengthController):
    """Chooses a random length before each step; records what is reported to it."""

    def __init__(self) -> None:
        super().__init__((0, 1, 3, 4))
        self._random = random.Random(7)
        self.chosen, self.accepted, self.timed = [self.tokens], list[int](), list[bool]()
        self.asked = list[int]()

    def choose(self, requests: int) -> None:
        self.asked.append(requests)
        self.tokens = self._random.choice(self.lengths)
        self.chosen.append(self.tokens)

    def learn(self, requests: int, tokens: int, accepted: NDArray[np.int32], seconds: float | None) -> None:
        assert (
            len(accepted) == requests == self.asked[len(self.timed)]
            and accepted.max() <= tokens <= self.chosen[len(self.timed)]
        )
        self.accepted.append(int(accepted.sum()))
        self.timed.append(seconds is not None)


@pytest.mark.needs("device")
@pytest.mark.parametrize("drafter", ["oracle", "guessing"])
def test_who_chooses_their_number_and_who_counts_them_are_told_the_same(engines, plain: Ran, drafter: str) -> None:
    engine = engines(drafter, plain, overlap=False, graph="off")
    engine.worker.length = told = Told()
    check_same(run(engine), plain)
    counted = sums_of(engine.scheduler.drafts)
    assert counted.accepted == sum(told.accepted) > 0
    # The time of a step that drafts another number of tokens for the next step is not reported.
    assert told.timed == [now == before for before, now in zip(told.chosen, told.chosen[1:], strict=False)]
    assert (counted.proposed == counted.accepted) == (drafter == "oracle")
    assert not engine.worker.drafter.closed
    engine.worker.close()
    assert engine.worker.drafter.closed


class Choosing(Told):
    """Ignores the reports."""

    def learn(self, requests: int, tokens: int, accepted: NDArray[np.int32], seconds: float | None) -> None:
        """Do nothing."""


@pytest.mark.needs("graphs.native")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_drafter_is_asked_for_as_many_as_the_next_step_verifies_and_told_how_long_texts_can_be(
    engines, plain: Ran, overlap: bool
) -> None:
    engine = engines("guessing", plain, overlap=overlap, graph="off")
    engine.worker.length, wanted = Choosing(), set[int]()
    own, before = engine.worker.drafter.advance, list[tuple[Any, int]]()

    def advance(rows: Any) -> Any:
        for slots, count in before[-1:]:
            assert (engine.worker._proposals[slots, count:] == NONE).all(), "a token that nobody proposed"
        before.append((rows.slots, rows.wanted))
        assert rows.wanted == engine.worker.length.tokens
        wanted.add(rows.wanted)
        # In each step that the host has not collected yet, between none and all draft tokens may be
        # accepted.
        unknown = rows.most_lens - rows.lengths.cpu().numpy()
        assert unknown.min(initial=0) >= 0 and unknown.max(initial=0) <= (1 + overlap) * 5
        return own(rows)[:, : rows.wanted]

    engine.worker.drafter.advance = advance
    check_same(run(engine), plain)
    assert wanted == {0, 1, 3, 4}


class Timed(LengthController):
    """Sums the reported step times."""

    def __init__(self) -> None:
        super().__init__((4,))
        self.seconds = 0.0

    def learn(self, requests: int, tokens: int, accepted: NDArray[np.int32], seconds: float | None) -> None:
        assert seconds is not None
        self.seconds += seconds


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_no_second_is_that_of_two_steps(engines, plain: Ran, overlap: bool) -> None:
    engine = engines("guessing", plain, overlap=overlap, graph="off")
    engine.worker.length = told = Timed()
    begin = time.perf_counter()
    run(engine)
    assert 0 < told.seconds < time.perf_counter() - begin


class Closing(ModelRunner):
    """Records that it was closed."""

    is_closed = False

    def close(self) -> None:
        super().close()
        self.is_closed = True


@pytest.mark.needs("device")
def test_the_runner_of_a_draft_is_closed_with_the_worker(engines, plain: Ran, folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"speculative": "standalone", "draft_model": str(copytree(folder, tmp_path / "draft"))}
    engine = engines("ngram", plain, graph="off", **settings)
    runner = engine.worker.drafter.runner
    runner.__class__ = Closing
    engine.worker.close()
    assert runner.is_closed


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_draft_takes_in_a_prompt_that_ends_beside_one_that_goes_on(
    engines, plain: Ran, folder: Path, tmp_path: Path, overlap: bool
) -> None:
    twin = str(copytree(folder, tmp_path / "draft"))
    settings: dict[str, Any] = {"speculative": "standalone", "draft_model": twin, "draft_tokens": 3, "graph": "off"}
    engine = engines("ngram", plain, overlap=overlap, max_batch_tokens=16, poison=True, **settings)
    check_same(run(engine), plain)
    # The draft model is the model itself, but does not apply penalties and XTC.
    counted = sums_of(engine.scheduler.drafts)
    assert counted.accepted > 0.6 * counted.proposed > TOKENS


@pytest.mark.needs("device")
def test_a_draft_reads_tokens_where_the_model_was_given_embeddings(
    engines, plain: Ran, tmp_path: Path, folder: Path
) -> None:
    draft = save(llama(max_position_embeddings=CONTEXT, vocab_size=VOCABULARY, hidden_size=32), tmp_path / "draft")
    engine = engines("ngram", plain, speculative="standalone", draft_model=str(draft), graph="off")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)

    def embed(requests: list[Request]) -> None:
        for request in requests:
            request.embeds = PromptEmbeds(table[request.prompt_ids], request.prompt_ids.tolist())

    check_same(run(engine, prepare=embed), plain)


@pytest.mark.needs("graphs.native")
@pytest.mark.parametrize("verified", [1, 2])
def test_a_draft_that_is_the_model_itself_is_right_from_the_first_proposal_on(
    engines, plain: Ran, folder: Path, tmp_path: Path, verified: int
) -> None:
    """It draws with the noise of the positions that it drafts for, after a prompt and after a
    verification."""
    twin = str(copytree(folder, tmp_path / "draft"))
    settings: dict[str, Any] = {"speculative": "standalone", "draft_model": twin, "draft_tokens": 3, "graph": "off"}
    engine = engines("ngram", plain, overlap=False, **settings)
    drawn = [{"temperature": 1.0, "seed": seed, "top_p": 0.9} for seed in range(5)]
    assert run(engine, tokens=1 + 4 * verified, samplings=drawn).decodes == 1 + verified


def test_what_the_host_proposes_takes_the_place_of_all_that_was_proposed() -> None:
    table = torch.tensor([[9, 9, 9], [1, 2, 3], [4, 5, 6], [7, 8, 9]])
    replace_proposals(table, torch.tensor([3, 1, 2]), torch.tensor([[11, 12, 13], [-1, -1, -1], [14, -1, -1]]))
    assert table.tolist() == [[9, 9, 9], [1, 2, 3], [14, -1, -1], [11, 12, 13]]
