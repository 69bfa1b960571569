"""What the walks over shapes find in transformers' classes: facts of an attention call, limits of
positions and of windows, layers with one input, and what a class does to its own scores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sglcore.core.errors import ConfigError
from sglcore.models.implementation import TRANSFORMERS
from sglcore.models.transformers_backend.attention_adapter import _rows
from sglcore.models.transformers_backend.kernel_layers import PackedLinear
from sglcore.models.transformers_backend.rope_tables import check_angles
from sglcore.models.transformers_backend.shape_walk import LENGTHS, lengths_of
from sglcore.models.transformers_backend.transformers_config import transformers_config
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.kernels.table import KernelTable
from tests.models.transformers.test_transformers_models import walked
from tests.models.transformers.test_transformers_own import tried
from tests.models.transformers.test_transformers_replacements import AnglesOfAStep, replaced
from tests.models.transformers_cases import load, sizes_of, tiny_model

# -- attention calls
# --------------------------------------------------------------------------------------------------


def test_every_fact_of_a_call_is_from_its_own_argument() -> None:
    def change(q: Tensor) -> dict[str, Any]:
        key, value = (q.new_empty(1, 2, q.shape[2], size) for size in (16, 8))
        return {"key": key, "value": value, "scaling": 3, "softcap": 5.0, "sliding_window": 7, "dropout": 0.1}

    call = walked(change)[0]
    assert (call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim) == (4, 2, 16, 8)
    assert (call.scaling, call.softcap, call.sinks, call.cells, call.slopes) == (3.0, 5.0, None, 0, None)
    assert call.window is None, "windows are those of masks"


def test_what_attention_is_given_as_none_is_not_asked_for() -> None:
    assert walked(lambda q: {"position_bias": None})[0].num_heads == 4


@pytest.mark.parametrize(
    ("known", "most", "wanted"),
    [
        ({}, 260, 260),
        ({"max_position_embeddings": 259}, 260, 259),
        ({"max_position_embeddings": 261}, 260, 260),
        ({"max_position_embeddings": 4096}, 4096, 4096),
        ({"max_position_embeddings": 4095}, 4096, 4095),
        ({"n_positions": 100, "max_seq_len": 90}, 260, 90),
        ({"n_positions": 100}, 260, 100),
        ({"max_position_embeddings": 300, "n_positions": 100}, 260, 100),
        ({"max_seq_len": 4}, 260, 4),
        ({"max_seq_len": 3}, 260, 260),
        ({"max_seq_len": None, "n_positions": True}, 260, 260),
    ],
)
def test_a_walk_has_no_more_tokens_than_the_class_has_positions(known: dict[str, Any], most: int, wanted: int) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(**known)))
    assert lengths_of(model, most) == (LENGTHS[0], wanted)


@pytest.mark.parametrize(("window", "is_served"), [(LENGTHS[1] - 1, True), (LENGTHS[1], False)])
def test_a_window_of_the_class_shows_only_in_a_longer_walk(window: int, is_served: bool, tmp_path: Path) -> None:
    model = tiny_model("gpt_neo", {**sizes_of("gpt_neo"), "window_size": window})
    with nullcontext() if is_served else pytest.raises(ConfigError, match=f"a window of {window}, which is not tested"):
        layers = load(model, tmp_path).attention_layers
        assert [layer.sliding_window for layer in layers] == [None, window, None]


@pytest.mark.parametrize(("task", "is_cached"), [("generate", True), ("embed", False)])
def test_a_model_that_embeds_keeps_no_keys(task: str, is_cached: bool, tmp_path: Path) -> None:
    tiny_model("exaone4", sizes_of("exaone4")).save_pretrained(tmp_path)
    config = transformers_config(tmp_path, task)
    architectures = {config.architecture: TRANSFORMERS}
    model: Any = load_model(
        tmp_path, config, kernels=KernelTable(), device="cpu", dtype=torch.float32, architectures=architectures
    )
    assert {layer.cached for layer in model.attention_layers} == {is_cached}


@pytest.mark.parametrize(("first", "is_served"), [(99, False), (100, True)])
@pytest.mark.parametrize("count", [1000, 100])
def test_angles_are_checked_up_to_the_last_position_of_the_context(first: int, is_served: bool, count: int) -> None:
    """Angles that change for a whole step that has a position from `first` on."""
    first += count - 100
    own = AnglesOfAStep(lambda places: places / (2 if places.max() >= first else 1))
    with nullcontext() if is_served else pytest.raises(ConfigError, match=f"if the other .* differ, up to {count - 1}"):
        check_angles(own, ((torch.zeros(1, 5, 4), torch.arange(5)[None]), {}), count)


@pytest.mark.parametrize(
    "changed",
    [
        lambda places: places * (2 if places[0, 0] > places[0, -1] else 1),
        lambda places: places * (2 if places.shape[1] > 1 and places.max() < 50 else 1),
        lambda places: places * (2 if places.shape[1] == 1 else 1),
        lambda places: places * (2 if places.max() < 99 else 1),
    ],
    ids=["in reverse", "early ones alone", "one alone", "without the last"],
)
def test_angles_are_asked_for_in_every_order_and_in_parts(changed: Any) -> None:
    call = (torch.zeros(1, 5, 4), torch.arange(5)[None]), {}
    with pytest.raises(ConfigError, match="other angles if the other positions differ, up to 99"):
        check_angles(AnglesOfAStep(changed), call, 100)


@pytest.mark.parametrize(("kind", "reads"), [("llama", False), ("glm4", False), ("llama", True), ("glm4", True)])
def test_forwards_are_changed_only_where_a_kernel_turns_heads(kind: str, reads: bool) -> None:
    """Angles that something else reads are the class's own, and so is all that uses them."""

    def read(module: nn.Module, args: Any, named: dict[str, Any]) -> None:
        named["position_embeddings"][0].sum()

    def change(model: Any) -> None:
        model.model.layers[0].register_forward_pre_hook(read, with_kwargs=True)

    model, found = replaced(kind, change if reads else None)
    changed = [module for module in model.modules() if "forward" in vars(module)]
    assert changed == list(found.turns) and len(changed) == (0 if reads else len(model.model.layers))
    assert len(found.rotaries) == (0 if reads else 1)


# -- heads as rows
# --------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[int, int, int], Tensor]] = {
    "transposed": lambda heads, tokens, size: torch.randn(1, tokens, heads, size).transpose(1, 2),
    "heads first": lambda heads, tokens, size: torch.randn(1, heads, tokens, size),
    "a part of wider rows": lambda heads, tokens, size: torch.randn(1, tokens, heads + 3, size)[:, :, 2:-1].transpose(
        1, 2
    ),
    "a part of wider heads": lambda heads, tokens, size: torch.randn(1, tokens, heads, size + 2)[..., 1:-1].transpose(
        1, 2
    ),
    "one head for all": lambda heads, tokens, size: torch.randn(1, 1, tokens, size).expand(1, heads, tokens, size),
    "columns": lambda heads, tokens, size: torch.randn(1, tokens, size, heads).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("wide", [8, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_become_rows_in_whatever_order_they_are_in_memory(
    layout: str, wide: int, heads: int, tokens: int
) -> None:
    part = LAYOUTS[layout](heads, tokens, 8)
    assert part.shape == (1, heads, tokens, 8)
    found = _rows(part, wide).view(tokens, heads, wide)
    for head in range(heads):
        assert torch.equal(found[:, head, :8], part[0, head]) and not found[:, head, 8:].any()


def test_heads_that_are_rows_in_memory_are_not_copied() -> None:
    whole = torch.randn(1, 5, 4, 8)
    for part in (whole.transpose(1, 2), whole[:, :, 1:3].transpose(1, 2)):
        assert _rows(part, 8).data_ptr() == part.data_ptr()


# -- layers with one input
# --------------------------------------------------------------------------------------------------


class Also(nn.Module):
    """Stands for an attention block's key projection: runs it twice, on two inputs, if `what` is
    "twice"."""

    def __init__(self, own: Any, what: str) -> None:
        super().__init__()
        self.own, self.what = own, what

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, 64] to [1, T, 32]."""
        return self.own(x) + (self.own(x * 2) if self.what == "twice" else 0)


def with_a_bias(attention: Any) -> None:
    attention.k_proj = nn.Linear(64, 32, bias=True, device="meta")


def with_an_input_of_its_own(attention: Any) -> None:
    own = attention.k_proj
    attention.k_proj = nn.Sequential(nn.Hardtanh(), own)


def run_twice(attention: Any) -> None:
    attention.k_proj = Also(attention.k_proj, "twice")


def run_once(attention: Any) -> None:
    attention.k_proj = Also(attention.k_proj, "once")


def owned_twice(attention: Any) -> None:
    attention.other = attention.k_proj


def with_a_shared_weight(attention: Any) -> None:
    attention.other = nn.Linear(64, 32, bias=False, device="meta")
    attention.other.weight = attention.k_proj.weight


@pytest.mark.parametrize(
    ("change", "keys", "parts"),
    [
        (run_once, PackedLinear, 3),
        (with_a_bias, PackedLinear, 1),
        (with_an_input_of_its_own, PackedLinear, 2),
        (run_twice, PackedLinear, 1),
        (owned_twice, nn.Linear, 2),
        (with_a_shared_weight, nn.Linear, 2),
    ],
)
def test_only_layers_that_always_take_one_input_are_one_product(
    change: Callable[[Any], None], keys: type[nn.Module], parts: int
) -> None:
    """`parts`: those of the query's product."""
    model, _ = replaced("llama", lambda model: change(model.model.layers[1].self_attn))
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    assert len(first.q_proj.product.parts) == 3
    assert len(second.q_proj.product.parts) == parts
    (own,) = {each for each in second.k_proj.modules() if isinstance(each, nn.Linear | PackedLinear)}
    assert type(own) is keys


# -- scores of a class's own
# --------------------------------------------------------------------------------------------------

SCALES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "times": (lambda scores: scores * 2, 0.5),
    "times, from the left": (lambda scores: 2 * scores, 0.5),
    "mul": (lambda scores: scores.mul(2.0), 0.5),
    "mul in place": (lambda scores: scores.mul_(2), 0.5),
    "torch.mul": (lambda scores: torch.mul(scores, 2), 0.5),
    "over": (lambda scores: scores / 4, 0.0625),
    "div": (lambda scores: scores.div(4), 0.0625),
    "div in place": (lambda scores: scores.div_(4), 0.0625),
    "torch.div": (lambda scores: torch.div(scores, 4), 0.0625),
    "both": (lambda scores: scores * 2 / 4, 0.125),
    "neither": (lambda scores: scores.float().contiguous(), 0.25),
}


@pytest.mark.parametrize("how", SCALES)
def test_a_scale_is_found_however_it_is_written(how: str) -> None:
    scaled, wanted = SCALES[how]
    assert tried(lambda scores, mask: scaled(scores) + mask).scaling == wanted


@pytest.mark.parametrize("how", ["*=", "/="])
def test_a_scale_in_an_assignment_is_found(how: str) -> None:
    def changed(scores: Tensor, mask: Tensor) -> Tensor:
        if how == "*=":
            scores *= 2
        else:
            scores /= 0.5
        return scores + mask

    assert tried(changed).scaling == 0.5
