"""What an output says of itself."""

from __future__ import annotations

from sglcore.schedule.output import EngineOutput


def test_an_output_tells_of_progress_if_it_says_how_far_the_prompt_is_though_that_be_nowhere() -> None:
    assert EngineOutput("r", 0, processed=0).is_progress
    assert not EngineOutput("r", 0, token_ids=[1]).is_progress
