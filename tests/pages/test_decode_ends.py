"""A decode engine without a network: what it takes from an answer, and what it leaves when it is
closed."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglcore.engine.disaggregation.transfer_messages import First, pack_logprobs
from sglcore.sampling.params import SamplingParams
from sglcore.worker.model_worker import TokenLogprobs
from sglcore.worker.page_transfer import Told
from tests.pages.test_decode_side import Playing


def test_messages_that_have_arrived_are_work_though_nothing_is_lent() -> None:
    playing = Playing(1)
    assert not playing.engine.has_work
    playing.transfer.news.append(Told(1, lost="it is gone"))
    assert playing.engine.has_work
    playing.engine.step()
    assert not playing.engine.has_work
    playing.engine.close()


def test_connections_are_closed_with_the_engine_when_nobody_connects_any_more() -> None:
    playing = Playing(1)
    assert playing.engine.pages is not None and playing.engine.pages.fileno() == -1
    playing.engine.close()
    playing.engine.close()
    side: Any = playing.engine.pages
    assert playing.transfer.closed == 1 and not side._seeker.is_alive()


def test_scores_of_a_prompt_are_those_that_its_engine_sends() -> None:
    playing = Playing(1)

    def scored(*tokens: int) -> bytes:
        ids = np.array(tokens, np.int32)
        return pack_logprobs(
            TokenLogprobs(-ids.astype(np.float32), ids, ids[:, None], -ids[:, None].astype(np.float32))
        )

    params = SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=0)
    (request,) = playing.engine.add("a", [4, 5, 6], params, 7)
    playing.hear()
    outputs = playing.hear((1, First(1, 9, 0, scored(9), [scored(5), scored(6)])))
    assert request.scored_tokens == 2 and [each.logprob for each in outputs[0].logprobs or ()] == [-9.0]
    assert [each and each.logprob for each in outputs[0].prompt_logprobs or ()] == [-5.0, -6.0]
    playing.engine.close()
