"""Decides from the past starts of one replica whether and when it is restarted. It uses no
processes and no clock."""

from __future__ import annotations

MOST_FAILED_STARTS = 3
"""Number of consecutive failed starts after which a replica is not started again."""
CONFIG_ERROR = 2
"""The exit code of a start that would fail in the same way again."""
SHORT_LIFE = 30.0
"""Seconds. An engine that was ready for less time is restarted after increasing waits."""
LONGEST_WAIT = 30.0
"""Default maximum seconds before a restart."""


class RestartPolicy:
    """Decides whether and when one replica is started again: `end` records how each of its
    processes ended; `may_go_on` and `wait` have the decision. It starts nothing itself."""

    def __init__(self, longest_wait: float = LONGEST_WAIT) -> None:
        """`longest_wait`: maximum seconds before a restart."""
        self._longest_wait = longest_wait
        self._failed_starts = 0
        self._short_lives = 0
        self._is_hopeless = False

    def end(self, lived: float | None, exit_code: int) -> None:
        """Record that the engine has ended `lived` seconds after it was ready (None: it never was),
        with this exit code."""
        self._failed_starts = self._failed_starts + 1 if lived is None else 0
        self._short_lives = self._short_lives + 1 if lived is None or lived < SHORT_LIFE else 0
        self._is_hopeless = lived is None and exit_code == CONFIG_ERROR

    @property
    def may_go_on(self) -> bool:
        """Whether the replica should be started again: its last start did not fail with
        CONFIG_ERROR, and fewer than MOST_FAILED_STARTS starts in a row failed."""
        return not self._is_hopeless and self._failed_starts < MOST_FAILED_STARTS

    @property
    def wait(self) -> float:
        """Seconds to wait before the next start, at most `longest_wait`: 0 after a life of
        SHORT_LIFE seconds or more, and after a first shorter one; after further short lives in a
        row 1, 2, 4 and so on. A failed start counts as a short life, and waits already the first
        time."""
        doublings = self._short_lives - (0 if self._failed_starts else 1)
        return min(2.0 ** (doublings - 1), self._longest_wait) if doublings > 0 else 0.0
