"""The features that a model gives a drafter for each token: the residual sums before some layers,
unchanged even if later layers overwrite their input."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sglcore.core.errors import ConfigError
from sglcore.runtime.speculative import target_features
from sglcore.runtime.speculative.target_features import FeatureModel, features_of, with_features
from tests.planted import planted

SIZE, TOKENS, LAYERS = 2, 3, 4


class State(NamedTuple):
    """The state that layers pass on."""

    hidden: Tensor
    residual: Tensor | None


class UsesUp:
    """Each layer doubles its input sum in place. `has_residual`: the sum has two parts."""

    layers: tuple[Any, ...] = (None,) * LAYERS
    attention_layers: tuple[Any, ...] = ()
    feature_size = SIZE

    def __init__(self, has_residual: bool) -> None:
        self.has_residual = has_residual

    def embed(self, batch: Any) -> State:
        ones = torch.ones(TOKENS, SIZE)
        return State(ones / 2, ones / 2) if self.has_residual else State(ones, None)

    def run_layers(self, state: State, first: int, last: int) -> State:
        for _ in range(first, last):
            state.hidden.mul_(2)
            if state.residual is not None:
                state.residual.mul_(2)
        return state

    def finish_both(self, state: State) -> tuple[Tensor, Tensor]:
        summed = state.hidden + (0 if state.residual is None else state.residual)
        return summed + 100, summed

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def embed_ids(self, ids: Tensor) -> Tensor:
        return ids


def check(kind: Any, has_residual: bool) -> None:
    batch: Any = None
    model = kind(UsesUp(has_residual), (0, 1, 3, LAYERS))
    found = model(batch)
    assert found[0].tolist() == [116.0] * 2 + [1.0] * 2 + [2.0] * 2 + [8.0] * 2 + [16.0] * 2
    assert model.logits(found).tolist() == [[116.0] * 2] * TOKENS
    assert features_of(found, model.feature_size)[0].tolist() == found[0, SIZE:].tolist()
    assert features_of(found, None) is found
    again, before = kind(UsesUp(has_residual), (0, 1, 3, LAYERS)).with_norm_inputs(batch)
    assert again.tolist() == found.tolist() and before.tolist() == [[16.0] * 2] * TOKENS


@pytest.mark.parametrize("has_residual", [False, True])
def test_features_are_the_sums_before_the_layers_that_were_asked_for(has_residual: bool) -> None:
    check(FeatureModel, has_residual)


@pytest.mark.parametrize(
    ("sound", "defect", "has_residual"),
    [
        ("state.hidden.clone() if", "state.hidden if", False),
        ("state.hidden + state.residual", "state.hidden", True),
        ("found.append(summed.flatten(1))\n            first = layer", "found.append(summed.flatten(1))", False),
    ],
)
def test_a_defect_shows(sound: str, defect: str, has_residual: bool) -> None:
    with pytest.raises(AssertionError):
        check(planted(target_features, sound, defect).FeatureModel, has_residual)


def test_a_model_that_runs_as_a_whole_gives_none() -> None:
    model: Any = object()
    assert with_features(model, ()) is model
    with pytest.raises(ConfigError, match="the inputs of the model's layers \\(1,\\), and object runs as a whole"):
        with_features(model, (1,))
