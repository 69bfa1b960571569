"""The labels of a classification head's scores, as config.json names them, and the scores'
conversion to probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.checkpoint.pooling_config import read_pooling


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a classification head, which `read_labels` reads: names in the order of the
    scores. `independent`: each label has a probability of its own, and several may hold.
    `is_ended`: scores are final, because a sigmoid was applied or the model was trained to predict
    numbers."""

    names: tuple[str, ...]
    independent: bool
    is_ended: bool

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Return probabilities float32 [labels] of scores float32 [labels]: a sigmoid of each if
        `independent`, else a softmax; if `is_ended`, the scores unchanged."""
        if self.is_ended:
            return scores
        if self.independent:
            return 1.0 / (1.0 + np.exp(-scores))
        powers = np.exp(scores - scores.max())
        return powers / powers.sum()


def read_labels(folder: Path) -> Labels:
    """Read the labels of a checkpoint folder, whose model must have a classification head. A label
    without a name is LABEL_N. Raises ConfigError."""
    raw = read_json(folder / "config.json")
    pooling = read_pooling(folder, raw["architectures"][0], raw)
    assert pooling is not None and pooling.labels
    given = raw.get("id2label") or {}
    names = tuple(given.get(str(place), f"LABEL_{place}") for place in range(pooling.labels))
    problem = raw.get("problem_type")
    several = problem == "multi_label_classification" or pooling.labels == 1
    return Labels(names, several, pooling.is_sigmoid or problem == "regression")
