"""Attention that transformers' classes compute themselves: which kinds are served, and that no
others are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softmax
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sglcore.core.errors import ConfigError
from sglcore.models.transformers_backend.eager_attention import Own, find_own, try_own
from sglcore.models.transformers_backend.shape_walk import AttentionCall, walk
from sglcore.models.transformers_backend.verified_types import PROVEN
from tests.models.transformers.test_transformers_models import empty
from tests.models.transformers_cases import compare, load, sizes_of, tiny_model


@pytest.mark.parametrize("kind", ["falcon", "gpt_neo", "openai-gpt"])
def test_what_classes_attend_to_by_themselves_is_the_engines(kind: str, tmp_path: Path) -> None:
    assert kind in PROVEN
    assert compare(tiny_model(kind, sizes_of(kind)), tmp_path) < 2e-4


def test_a_window_in_a_mask_of_the_class_is_the_layers(tmp_path: Path) -> None:
    layers = load(tiny_model("gpt_neo", sizes_of("gpt_neo")), tmp_path).attention_layers
    assert [layer.sliding_window for layer in layers] == [None, 7, None] and {layer.scaling for layer in layers} == {
        1.0
    }


def test_linear_layers_of_a_class_made_of_torchs_are_packed(tmp_path: Path) -> None:
    model = load(tiny_model("falcon", sizes_of("falcon")), tmp_path)
    packed = {name.rpartition(".h.0.")[2] for layer in model.weights.linears for name in layer.names if ".h.0." in name}
    assert packed >= {"self_attention.query_key_value.weight", "self_attention.dense.weight"}


class Attends(nn.Module):
    """Attention by four heads without weights; `changed` modifies its scores."""

    __module__ = "transformers.models.made"

    def __init__(self, changed: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.changed = changed

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> tuple[Tensor, None]:
        """Hidden states [1, T, 64]."""
        q = hidden_states.view(1, -1, 4, 16).transpose(1, 2)
        scores = self.changed(torch.matmul(q, q.transpose(-1, -2)) / 4.0, attention_mask)
        out = torch.matmul(nn.functional.softmax(scores, dim=-1), q)
        return out.transpose(1, 2).reshape(hidden_states.shape), None


def tried(changed: Callable[[Tensor, Tensor], Tensor], kind: str = "llama", **buffers: Tensor) -> AttentionCall:
    """The attention call of a model with changed scores in its first layer, which has buffers."""
    model = empty(kind)
    model.model.layers[0].self_attn = Attends(changed)
    for name, buffer in buffers.items():
        model.model.layers[0].self_attn.register_buffer(name, buffer)
    owns = find_own(list(model.modules()))
    calls = walk(model)
    return try_own([own for own in owns if own.settle()], calls)[0]


def test_scores_with_the_models_mask_are_the_engines() -> None:
    call = tried(lambda scores, mask: scores + mask)
    assert (call.num_heads, call.scaling, call.window) == (4, 0.25, None)
    assert tried(lambda scores, mask: (scores + mask) * 2).scaling == 0.5


@pytest.mark.parametrize("index", [0, -1])
def test_a_list_of_one_place_takes_that_place(index: int) -> None:
    assert tried(lambda scores, mask: scores + mask[:, [index]]).num_heads == 4


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda scores, mask: scores, "makes its own masks"),
        (lambda scores, mask: scores + mask + scores.new_ones(scores.shape).cumsum(-1), "attention differs, by"),
        (lambda scores, mask: scores * torch.tensor(2.0, device=scores.device) + mask, "attention differs, by"),
        (lambda scores, mask: (scores / 8).tanh() * 8 + mask, "attention differs, by"),
    ],
    ids=["both ways", "a bias of places", "a scale that is a tensor", "a cap"],
)
def test_scores_that_become_something_else_are_refused(changed: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tried(changed)


@pytest.mark.parametrize(
    "changed",
    [
        lambda scores, mask: (scores / 50).tanh() * 50 + mask,
        lambda scores, mask: (scores / 1000).tanh() * 1000 + mask,
        lambda scores, mask: scores.clamp(-100, 100) + mask,
        lambda scores, mask: scores + mask.clamp(min=-40),
        lambda scores, mask: scores.abs().add(1e-6).pow(1.001) * scores.sign() + mask,
    ],
    ids=["a cap", "a far cap", "a limit", "a mask that large scores pass", "a power near one"],
)
def test_scores_that_differ_only_where_queries_and_keys_are_large_are_refused(changed: Any) -> None:
    with pytest.raises(ConfigError, match="attention differs, by"):
        tried(changed)


def masked(kind: str, *windows: int) -> AttentionCall:
    """The call of a class with a mask for each of `windows` in a buffer, in addition to the
    model's."""
    back = torch.arange(256)[:, None] - torch.arange(256)
    shown = {f"shown{window}": ((back >= 0) & (back < window))[None, None] for window in windows}

    def changed(scores: Tensor, mask: Tensor) -> Tensor:
        scores, size = scores + mask, scores.shape[-1]
        for each in shown.values():
            scores = torch.where(each[..., :size, :size], scores, torch.finfo(torch.float32).min)
        return scores

    return tried(changed, kind, **shown)


@pytest.mark.parametrize(
    ("kind", "own", "window"),
    [
        ("llama", (256,), None),
        ("llama", (7,), 7),
        ("llama", (255,), 255),
        ("llama", (7, 5), 5),
        ("llama", (5, 7), 5),
        ("llama", (256, 7), 7),
        ("llama", (5, 9, 7, 256), 5),
        ("mistral", (256,), 6),
        ("mistral", (5,), 5),
        ("mistral", (1,), 1),
        ("mistral", (9, 4), 4),
    ],
)
def test_the_smallest_window_of_the_model_and_of_the_class_is_the_layers(
    kind: str, own: tuple[int, ...], window: int | None
) -> None:
    """Mistral has a window of six tokens here; a mask of 256 hides nothing more."""
    assert masked(kind, *own).window == window


@pytest.mark.parametrize("own", [6, 7, 200])
def test_a_window_that_the_models_own_hides_is_refused(own: int) -> None:
    with pytest.raises(ConfigError, match=f"its own mask has a window of {own}, which is not tested"):
        masked("mistral", own)


def of_code(forward: Callable[..., Any], module: str = "transformers.models.made") -> nn.Module:
    """A module of a class with this forward."""
    return type("Made", (nn.Module,), {"__module__": module, "forward": forward})()


@pytest.mark.parametrize(
    ("module", "may_attend"),
    [
        (of_code(lambda self, x: softmax(x, dim=-1)), True),
        (of_code(lambda self, x: nn.Softmax(dim=-1)(x)), True),
        (of_code(lambda self, x: nn.functional.scaled_dot_product_attention(x, x, x)), True),
        (of_code(lambda self, x: softmax(ALL_ATTENTION_FUNCTIONS["eager"](x), dim=-1)), False),
        (of_code(lambda self, x: x.sigmoid()), False),
        (of_code(lambda self, x: softmax(x, dim=-1), "torch.nn.made"), False),
    ],
    ids=["softmax", "Softmax", "torch's attention", "transformers' attention", "no softmax", "not transformers'"],
)
def test_attention_of_a_class_is_looked_for_where_its_code_may_compute_it(module: nn.Module, may_attend: bool) -> None:
    assert [own.module for own in find_own([module])] == [module] * may_attend


@pytest.mark.parametrize("kind", ["gpt_neo", "mamba2"])
def test_trials_of_random_numbers_leave_those_of_the_process_as_they_are(kind: str, tmp_path: Path) -> None:
    """After a load, two processes with other seeds draw other numbers."""
    model, drawn = tiny_model(kind, sizes_of(kind)), []
    for seed in (3, 4):
        torch.manual_seed(seed)
        load(model, tmp_path / str(seed))
        drawn.append(torch.rand(2))
    assert not torch.equal(*drawn)


def test_a_window_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sglcore.models.transformers_backend.eager_attention._window", lambda mask: None)
    with pytest.raises(ConfigError, match="GPTNeoSelfAttention .* attention differs"):
        load(tiny_model("gpt_neo", sizes_of("gpt_neo")), tmp_path)


def test_only_masks_that_are_absent_and_a_bias_become_zeros() -> None:
    own, hidden, mask = Own(nn.Identity()), torch.ones(1, 5, 4), torch.ones(1, 1, 5, 5)
    given = {"hidden": hidden, "mask": mask, "bias": torch.ones(2, 4, 1, 3)}
    assert own.without_places((), given) is given
    own._masks = ["mask"]
    assert own.without_places((), given) is given
    for absent in ({"mask": None}, {}):
        found = own.without_places((hidden,), absent)["mask"]
        assert found.shape == (1, 1, 5, 5) and not found.any()
    own._bias = "bias"
    found = own.without_places((), given)
    assert found["mask"] is mask and found["hidden"] is hidden
    assert found["bias"].shape == (2, 4, 1, 5) and not found["bias"].any()
    walked = {**given, "hidden": hidden.to("meta")}
    assert own.without_places((), walked) is walked
