"""When the output layer of a class runs by itself: the class does nothing before it, and at most a
scale or a soft cap after it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from sglcore.models.transformers_backend.output_head import PackedHead, output_of


class Causal(nn.Module):
    """A causal class that does something before and after its output layer."""

    base_model_prefix = "model"

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.base_model = nn.Identity(), nn.Identity()
        self.lm_head = PackedHead(nn.Linear(4, 9, False), "lm_head", None)
        self.lm_head.logits = lambda hidden: hidden.repeat(1, 2)
        self.before, self.after = before, after

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Any:
        """Hidden states [1, N, 4]."""
        hidden = self.before(self.model(inputs_embeds=inputs_embeds).last_hidden_state)
        return SimpleNamespace(logits=self.after(self.lm_head(hidden)))


def unchanged(x: Tensor) -> Tensor:
    """Nothing."""
    return x


@pytest.mark.parametrize(
    ("before", "after", "is_known"),
    [
        (unchanged, unchanged, True),
        (torch.clone, torch.clone, True),
        (lambda x: x * 2, unchanged, False),
        (lambda x: x + 1e-3, unchanged, False),
        (lambda x: x[:, 1:], unchanged, False),
        (unchanged, lambda x: torch.cat((x, x), dim=-1), False),
        (unchanged, lambda x: x[:, 1:], False),
        (unchanged, lambda x: x.sin(), False),
        (unchanged, lambda x: x * -2, True),
    ],
)
def test_only_the_decoders_own_result_goes_to_an_output_layer_by_itself(
    before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor], is_known: bool
) -> None:
    model: Any = Causal(before, after)
    output = output_of(model, model.lm_head, cast("Any", None))
    assert (output is not None) is is_known
    hidden = torch.randn(3, 4)
    assert output is None or torch.equal(output(hidden), after(hidden.repeat(1, 2)))
    model.lm_head.logits = None
    assert output_of(model, model.lm_head, cast("Any", None)) is None


@pytest.mark.parametrize("error", [TypeError, RuntimeError, AttributeError, NotImplementedError, KeyError, IndexError])
def test_a_class_that_fails_without_its_decoder_keeps_its_own_ends(error: type[Exception]) -> None:
    def fails(x: Tensor) -> Tensor:
        raise error(x)

    model: Any = Causal(fails, unchanged)
    assert output_of(model, model.lm_head, cast("Any", None)) is None


def test_an_output_layer_gives_its_rows_type() -> None:
    layer = PackedHead(nn.Linear(4, 9, False), "lm_head", None)
    hidden = torch.randn(1, 3, 4)
    assert layer(hidden).shape == (1, 3, 9)
    layer.logits = lambda rows: rows.float().repeat(1, 2)
    found = layer(hidden.bfloat16())
    assert (found.dtype, found.shape) == (torch.bfloat16, (1, 3, 8))
