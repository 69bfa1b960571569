"""Which replica takes a request."""

from __future__ import annotations

from collections.abc import Sequence

from sglcore.serving.replica import Replica


class Router:
    """Chooses among the replicas that are ready."""

    def choose(self, ready: Sequence[Replica], ids: Sequence[int]) -> Replica:
        """The replica for a prompt; `ready` is not empty."""
        return min(ready, key=lambda replica: (replica.load, replica.number))

    def forget(self, replica: Replica) -> None:
        """A replica has ended; what it had cached is gone."""
