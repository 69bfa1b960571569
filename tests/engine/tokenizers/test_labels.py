"""The activation of a classification head's scores is that of transformers' text-classification
pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sglcore.engine.labels import read_labels

SCORES = np.array([0.3, -1.5, 2.0, 0.0], np.float32)
ENDS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda scores: scores.softmax(-1),
    "single_label_classification": lambda scores: scores.softmax(-1),
    "multi_label_classification": torch.sigmoid,
    "regression": lambda scores: scores,
}
"""The pipeline's function on the scores of several labels, by the `problem_type` of config.json."""


@pytest.mark.parametrize("problem", list(ENDS))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_probabilities_are_those_of_the_problem_that_the_checkpoint_names(
    problem: str | None, count: int, tmp_path: Path
) -> None:
    names = {place: f"name {place}" for place in range(count)}
    raw = {"architectures": ["BertForSequenceClassification"], "problem_type": problem, "id2label": names}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    labels = read_labels(tmp_path)
    found = labels.probabilities(SCORES[:count])
    assert labels.names == tuple(names.values())
    assert found.tolist() == pytest.approx(ENDS[problem](torch.tensor(SCORES[:count])).tolist(), abs=1e-6)


@pytest.mark.parametrize("problem", list(ENDS))
def test_a_single_score_that_has_ended_by_a_sigmoid_is_not_ended_again(problem: str | None, tmp_path: Path) -> None:
    raw = {"architectures": ["BertForSequenceClassification"], "problem_type": problem, "id2label": {"0": "x"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    labels = read_labels(tmp_path)
    assert labels.is_ended and labels.probabilities(np.array([0.75], np.float32)).tolist() == [0.75]


def test_labels_without_names_have_the_usual_ones(tmp_path: Path) -> None:
    raw = {"architectures": ["BertForSequenceClassification"], "num_labels": 3, "id2label": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_labels(tmp_path).names == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
def test_probabilities_of_large_scores_are_numbers(problem: str | None, tmp_path: Path) -> None:
    raw = {"architectures": ["BertForSequenceClassification"], "problem_type": problem, "num_labels": 3}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = read_labels(tmp_path).probabilities(np.array([500.0, 0.0, 80.0], np.float32))
    assert found.tolist() == pytest.approx([1.0, 0.5, 1.0] if problem else [1.0, 0.0, 0.0])


def test_a_label_that_is_not_named_has_its_number(tmp_path: Path) -> None:
    raw = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "2": "yes", "3": "both"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_labels(tmp_path).names == ("no", "LABEL_1", "yes")


def test_a_single_score_that_no_function_has_ended_is_a_probability_by_a_sigmoid(tmp_path: Path) -> None:
    """A softmax over one score is 1 for every text."""
    raw = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}}
    ends = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **ends}))
    labels = read_labels(tmp_path)
    assert labels.independent and not labels.is_ended
    assert labels.probabilities(np.array([0.3], np.float32)).tolist() == pytest.approx([1 / (1 + np.exp(-0.3))])
