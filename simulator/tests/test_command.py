"""`python -m sglcore_sim` refuses commands that it can not run. Trials of devices show that its
processes have the simulated device."""

from __future__ import annotations

import pytest

from sglcore_sim.__main__ import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: python -m sglcore_sim"),
        (["npu"], "usage: python -m sglcore_sim"),
        (["no_such", "true"], "error: found simulated kind 'no_such', wanted one of cuda"),
        (["npu:no_such", "true"], "error: found npu chip 'no_such', wanted one of"),
        (["npu", "no-such-command"], "error: found no command 'no-such-command'"),
    ],
)
def test_a_command_that_can_not_be_run_says_why(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(words)
