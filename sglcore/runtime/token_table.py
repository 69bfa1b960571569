"""State of each request slot that the device keeps between steps: the last token, and the token
history if sampling needs it.

A decode step reads its input ids from here, not from the host. It can therefore be scheduled before
the tokens of the step before it are known.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.step.tables import new_history
from sglcore.worker.schedule_batch import ScheduleBatch

HISTORY = ("history_slots", "history_positions", "history_ids")
"""The names, among a step's arrays, of the slots, positions and token ids that `TokenTable.apply`
stores in the history.
"""


class TokenTable:
    """The last sampled token of each slot, and optionally the slot's token history.

    `last` is int32[slots + 1]. A `SlotTable`, for the history.
    """

    def __init__(self, max_requests: int, max_model_len: int, device: str) -> None:
        self.last = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self._history_shape = (max_requests + 1, max_model_len + 1)
        self._history: Tensor | None = None

    @property
    def history(self) -> Tensor:
        """int32[slots + 1, context + 1]: the tokens of each slot, allocated at first use.

        For requests with penalties or n-gram inputs.
        """
        if self._history is None:
            self._history = torch.zeros(self._history_shape, dtype=torch.int32, device=self.last.device)
        return self._history

    def changes(self, batch: ScheduleBatch) -> Mapping[str, NDArray]:
        """Return slots, positions and ids, one entry per token, by the names in HISTORY: the known
        tokens of requests that enter a slot and need their history. Empty if there are none.
        """
        found = new_history(batch)
        return {} if found is None else dict(zip(HISTORY, found, strict=True))

    def apply(self, arrived: Mapping[str, Tensor]) -> None:
        """Store the result of `changes`, once it is on the device. Does not wait."""
        if "history_ids" in arrived:
            self.admit_history(*(arrived[name] for name in HISTORY))

    def resolve_future(self, input_ids: Tensor) -> None:
        """Replace each negative id -s by the last token of slot s, in place. Does not wait."""
        futures = self.last[(-input_ids).clamp_(min=0)]
        torch.where(input_ids < 0, futures, input_ids, out=input_ids)

    def resolve_decode(self, input_ids: Tensor, slots: Tensor) -> None:
        """Write the last token of each slot int32[B] to `input_ids` int32[B], for a decode step."""
        torch.index_select(self.last, 0, slots, out=input_ids)

    def publish(self, slots: Tensor, tokens: Tensor) -> None:
        """Store tokens int32[N] as the last tokens of slots int[N]."""
        self.last.scatter_(0, slots, tokens)

    def admit_history(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Store tokens int32[N] in the history, at positions int[N] of slots int[N].

        Does not wait.
        """
        self.history[slots, positions] = tokens
