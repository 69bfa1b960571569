"""Decides from the past starts of one replica whether and when it is restarted. It knows no
processes and no clock."""

from __future__ import annotations

MOST_FAILED_STARTS = 3
"""Consecutive failed starts after which a replica is given up."""
CONFIG_ERROR = 2
"""The exit code of a start that would fail the same way again."""
SHORT_LIFE = 30.0
"""Seconds; an engine that was ready for less is restarted more and more slowly."""
LONGEST_WAIT = 30.0
"""Longest time before a start, in seconds."""


class RestartPolicy:
    """The record of a replica's starts and ends."""

    def __init__(self, longest_wait: float = LONGEST_WAIT) -> None:
        """`longest_wait` in seconds."""
        self._longest_wait = longest_wait
        self._failed_starts = 0
        self._short_lives = 0
        self._is_hopeless = False

    def end(self, lived: float | None, exit_code: int) -> None:
        """Note that an engine has ended `lived` seconds after it was ready; None: its start
        failed."""
        self._failed_starts = self._failed_starts + 1 if lived is None else 0
        self._short_lives = self._short_lives + 1 if lived is None or lived < SHORT_LIFE else 0
        self._is_hopeless = lived is None and exit_code == CONFIG_ERROR

    @property
    def may_go_on(self) -> bool:
        """Whether another start makes sense."""
        return not self._is_hopeless and self._failed_starts < MOST_FAILED_STARTS

    @property
    def wait(self) -> float:
        """Seconds before the next start: 0 after a first death, then 1, 2, 4; a failed start counts
        as a death."""
        doublings = self._short_lives - (0 if self._failed_starts else 1)
        return min(2.0 ** (doublings - 1), self._longest_wait) if doublings > 0 else 0.0
