"""What an output reports about itself."""

from __future__ import annotations

from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.result_checks import take_prompt_logprobs
from tests.schedule.drive import Drive
from tests.schedule.fake_worker import make_scores


def test_an_output_tells_of_progress_if_it_says_how_far_the_prompt_is_though_that_be_nowhere() -> None:
    assert EngineOutput("r", 0, processed=0).is_progress
    assert not EngineOutput("r", 0, token_ids=[1]).is_progress


def test_the_first_output_has_the_prompt_s_scores_by_token_however_many_chunks_they_came_in() -> None:
    request = Drive().make("a", 9, prompt_logprobs=0)
    for start, end in ((0, 4), (4, 9)):
        ids = request.prompt_ids[start + 1 : end + 1].tolist()
        take_prompt_logprobs(request, make_scores(ids, 0), start, end)
    request.output_ids.append(7)
    told = request.output([7]).prompt_logprobs
    assert told is not None and [each.token_id for each in told] == request.prompt_ids[1:].tolist()
