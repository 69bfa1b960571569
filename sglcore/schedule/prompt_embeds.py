"""Prompts as embeddings, which replace the rows of the model's embedding table for their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglcore.schedule.request_errors import RequestError

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """A prompt of P tokens as embeddings [P, H]: `inputs_embeds` of transformers.

    `token_ids` [P], if known, are used by penalties, prompt log-probabilities and n-grams.
    `positions` [3, P] are the time, height and width positions of a model with three-axis rotary
    embeddings (None: indices in the prompt). Tokens after the prompt continue after the largest
    position.
    """

    embeds: ArrayLike
    token_ids: Sequence[int] | None = None
    positions: ArrayLike | None = None

    def __post_init__(self) -> None:
        """Convert `embeds` to float32 and `positions` to int32. Raises RequestError for a wrong
        shape or type."""
        try:
            embeds = np.ascontiguousarray(self.embeds, np.float32)
            positions = None if self.positions is None else np.ascontiguousarray(self.positions, np.int32)
        except (TypeError, ValueError) as error:
            raise RequestError(f"prompt embeddings cannot be read: {error}; give numbers [tokens, hidden]") from None
        object.__setattr__(self, "embeds", embeds)
        object.__setattr__(self, "positions", positions)
        if embeds.ndim != 2 or not len(embeds):
            raise RequestError(f"prompt embeddings have the shape {embeds.shape}; give [tokens, hidden]")
        for name, found, wanted in (
            ("token_ids", None if self.token_ids is None else (len(self.token_ids),), (len(embeds),)),
            ("positions", None if positions is None else positions.shape, (3, len(embeds))),
        ):
            if found not in (None, wanted):
                raise RequestError(
                    f"{name} of a prompt of {len(embeds)} embeddings have the shape {found}; give {wanted}"
                )

    @property
    def ids(self) -> Sequence[int]:
        """The token ids, or zeros if unknown."""
        return self.token_ids if self.token_ids is not None else [0] * len(self.rows)

    @property
    def rows(self) -> NDArray[np.float32]:
        """The embeddings, float32 [P, H]."""
        return np.asarray(self.embeds, np.float32)

    @property
    def axes(self) -> Ints:
        """The positions, int32 [3, P]."""
        plain = np.broadcast_to(np.arange(len(self.rows), dtype=np.int32), (3, len(self.rows)))
        return plain if self.positions is None else np.asarray(self.positions, np.int32)

    @property
    def delta(self) -> int:
        """What to add to the index of a token after the prompt to get its position; 0 without
        `positions`."""
        return int(self.axes.max()) + 1 - len(self.rows)
