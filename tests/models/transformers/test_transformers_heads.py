"""When the output layer of a class runs by itself: the class does nothing before it, and at most a
scale or a soft cap after it; and what stays the class's own because it reads a weight."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sglcore.models.transformers_backend.kernel_layers import Rows
from sglcore.models.transformers_backend.kernel_replacement import replace
from sglcore.models.transformers_backend.output_head import PackedHead, output_of, replace_ends
from sglcore.models.transformers_backend.shape_walk import DoesNotRun
from tests.models.transformers_cases import sizes_of


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


class Reads(nn.Module):
    """Stands for a feed-forward block: does something with a weight, from `least` tokens on."""

    def __init__(self, own: nn.Module, uses: Callable[[Tensor], Tensor], least: int) -> None:
        super().__init__()
        self.own, self.uses, self.least = own, uses, least

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [1, T, 64]."""
        return self.uses(self.own(x)) if x.shape[1] >= self.least else self.own(x)


def llama(is_tied: bool) -> Any:
    """A Llama on the meta device, perhaps with one weight for both ends."""
    sizes = {**sizes_of("llama"), "tie_word_embeddings": is_tied}
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**sizes)).eval()
    model.tie_weights()
    return model


def read(uses: Callable[[Any, Tensor], Tensor], is_tied: bool = False, least: int = 1) -> Any:
    """A Llama with replaced parts, in which the second layer does something with a weight."""
    model = llama(is_tied)
    layer = model.model.layers[1]
    layer.mlp = Reads(layer.mlp, lambda x: uses(model, x), least)
    replace(model, lambda name: False)
    return model


def nothing(model: Any, x: Tensor) -> Tensor:
    """Use no weight."""
    return x


def embedding(model: Any, x: Tensor) -> Tensor:
    """Add a row of the embedding."""
    return x + model.get_input_embeddings().weight[0]


def head(model: Any, x: Tensor) -> Tensor:
    """Add a row of the output layer."""
    return x + model.get_output_embeddings().weight[0]


@pytest.mark.parametrize(
    ("uses", "is_tied", "replaced"),
    [
        (nothing, False, (True, True)),
        (embedding, False, (False, True)),
        (head, False, (True, False)),
        (nothing, True, (True, True)),
        (embedding, True, (False, False)),
        (head, True, (False, False)),
    ],
)
def test_an_end_whose_weight_is_read_stays_the_classes_own_and_a_tied_one_with_it(
    uses: Callable[[Any, Tensor], Tensor], is_tied: bool, replaced: tuple[bool, bool]
) -> None:
    model = read(uses, is_tied)
    assert (type(model.get_input_embeddings()) is Rows, type(model.get_output_embeddings()) is PackedHead) == replaced


@pytest.mark.parametrize("uses", [embedding, head])
@pytest.mark.parametrize("is_tied", [False, True])
def test_an_end_whose_weight_is_read_with_many_tokens_alone_is_refused(
    uses: Callable[[Any, Tensor], Tensor], is_tied: bool
) -> None:
    read(uses, is_tied, least=1000)
    with pytest.raises(DoesNotRun, match="differently with 256 tokens than with 3"):
        read(uses, is_tied, least=100)


def test_a_class_that_computes_with_a_norms_weight_does_not_run_with_another_norm() -> None:
    with pytest.raises(DoesNotRun, match="LlamaForCausalLM .* computes with a norm's weight"):
        read(lambda model, x: x * model.model.norm.weight)
    read(lambda model, x: x.to(model.model.norm.weight.dtype))


class Shifted(nn.Embedding):
    """An embedding of a class's own."""

    def forward(self, input: Tensor) -> Tensor:
        """Rows plus one."""
        return super().forward(input) + 1


def as_it_is(model: Any) -> None:
    """Change nothing."""


def with_another_embedding(model: Any) -> None:
    """Make the embedding one that is no plain one."""
    model.model.embed_tokens.__class__ = Shifted


def with_a_bias(model: Any) -> None:
    """Give the output layer a bias."""
    model.lm_head.bias = nn.Parameter(torch.empty(97, device="meta"))


def with_a_third(model: Any) -> None:
    """Share the weight with another layer."""
    model.other = nn.Embedding(97, 64, device="meta")
    model.other.weight = model.lm_head.weight


@pytest.mark.parametrize(
    ("change", "kept", "is_replaced"),
    [
        (as_it_is, "", True),
        (as_it_is, "lm_head.weight", False),
        (as_it_is, "model.embed_tokens.weight", False),
        (with_another_embedding, "", False),
        (with_a_bias, "", False),
        (with_a_third, "", False),
    ],
)
def test_tied_ends_are_replaced_together_or_not_at_all(
    change: Callable[[Any], None], kept: str, is_replaced: bool
) -> None:
    model = llama(is_tied=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    change(model)
    ends = replace_ends(model, model.state_dict(keep_vars=True), lambda name: name == kept)
    assert (ends.embedding is not None, ends.head is not None) == (is_replaced, is_replaced)
    assert ends.head is None or ends.head.tied is ends.embedding
