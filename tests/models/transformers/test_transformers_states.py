"""Layers of transformers' classes with recurrent states: what they keep, which forget between
chunks, refusals, and independence of the rows in a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sglcore.core.errors import ConfigError
from sglcore.models.transformers_backend import equivalence_check
from sglcore.models.transformers_backend.equivalence_check import whole
from sglcore.models.transformers_backend.stateful_layers import Mixer, Results, check_mixers, find_mixers
from sglcore.runtime.memory.states import StateTensor
from tests.checkpoints import qwen3_next, save
from tests.laws.engine import TokenEngine
from tests.models.steps import Steps
from tests.models.transformers_cases import compare, compare_served, load, sizes_of, tiny_model


def tiny(kind: str) -> Any:
    """A model as in the sweep."""
    return tiny_model(kind, sizes_of(kind))


@pytest.mark.parametrize(
    "kind", ["jamba", "mamba", "falcon_mamba", "minimax", "falcon_h1", "kimi_linear", "mamba2", "zaya"]
)
def test_recurrent_types_give_what_their_own_forward_gives(kind: str, tmp_path: Path) -> None:
    assert compare(tiny(kind), tmp_path) <= 2e-4


def test_the_nearer_one_of_a_models_two_forwards_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence_check, "whole", lambda model, tokens: whole(model, tokens) + 1)
    assert compare(tiny("mamba2"), tmp_path) <= 2e-4


def test_what_forgets_is_served_with_prefix_hits_and_retraction(tmp_path: Path) -> None:
    assert compare_served(tiny("jamba"), tmp_path) <= 2e-4


def test_a_layer_says_what_it_keeps_of_a_request(tmp_path: Path) -> None:
    model = load(tiny("qwen3_next"), tmp_path)
    kept = [dict(layer.kept) for layer in model.state_layers]
    float32 = torch.float32
    wanted = {"conv0": StateTensor((112, 4), float32), "recurrent0": StateTensor((4, 16, 12), float32)}
    assert kept == [wanted, wanted] and len(model.attention_layers) == 1
    assert not any(layer.forgets or layer.remark for layer in model.state_layers)


def test_linear_layers_whose_weight_is_read_stay_and_others_are_packed(tmp_path: Path) -> None:
    mixer = load(tiny("jamba"), tmp_path).state_layers[0]
    assert {type(mixer.module.dt_proj), type(mixer.module.in_proj)} > {nn.Linear}
    assert type(mixer.module.dt_proj) is nn.Linear


def test_who_forgets_between_chunks_gets_later_tokens_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("jamba")
    layers = load(model, tmp_path).state_layers
    assert all(layer.forgets for layer in layers)
    assert layers[0].remark.startswith("JambaMambaMixer ignores its state with several tokens")
    monkeypatch.setattr(
        "sglcore.models.transformers_backend.transformers_model.check_mixers", lambda mixers: None
    )  # skip the check that finds the forgetting
    assert compare(model, tmp_path) > 0.01


def test_who_forgets_goes_on_beside_one_that_begins(tmp_path: Path) -> None:
    model = tiny("jamba")
    steps, (ids, other) = Steps(load(model, tmp_path)), torch.randint(3, 90, (2, 9))
    steps.logprobs({2: ids[:4].tolist()})
    found = steps.logprobs({1: other.tolist(), 2: ids[4:].tolist()})
    with torch.no_grad():
        wanted = [model(each[None], use_cache=False).logits[0].log_softmax(-1) for each in (other, ids)]
    torch.testing.assert_close(found, torch.cat((wanted[0], wanted[1][4:])), rtol=0, atol=2e-4)


class Keeper(nn.Module):
    """Keeps a sum over all tokens; `what` selects a defect of `forward`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight, self.what, self.chunk_size = nn.Parameter(torch.ones(4)), what, 256

    def forward(self, hidden: Tensor, cache_params: Any = None) -> Tensor:
        """[rows, T, 4]."""
        before, begun = cache_params.get_recurrent_state(0), torch.zeros_like(hidden[:, 0])
        if before is None:
            before = begun + (1 if self.what == "begins" else 0)
        if (self.what == "alone" and hidden.shape[1] == 1) or (self.what == "forgets" and hidden.shape[1] > 1):
            before = begun
        if self.what == "rows":
            before = before.mean(0, keepdim=True).expand(begun.shape)
        if self.what == "nearly" and hidden.shape[1] == 1:
            hidden = hidden * 1.01
        if self.what == "limit" and hidden.shape[1] == 1:
            hidden = hidden.clamp(-5, 5)
        size = {"fixed": 64, "told": self.chunk_size}.get(self.what, hidden.shape[1])
        chunks = [each.cumsum(1) * self.weight for each in hidden.split(size, dim=1)]
        sums = torch.cat((before[:, :4][:, None] + chunks[0], *chunks[1:]), dim=1)  # restarts
        kept = sums[:, -1] if self.what != "long" else sums.flatten(1)
        cache_params.update_recurrent_state(kept, 0)
        return sums


def mixer(what: str) -> Mixer:
    """A mixer traced on shapes, then given weights on the CPU."""
    with torch.device("meta"):
        made = Mixer(0, Keeper(what))
        for length in (3, 9):
            made.module(torch.ones(1, length, 4))
    made.module.to_empty(device="cpu")
    made.module.weight = nn.Parameter(torch.ones(4))
    return made


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("begins", "initial state is not zero"),
        ("limit", "results token by token differ"),
        ("nearly", "results token by token differ"),
        ("rows", "its results for a request depend on other requests of the step"),
        ("fixed", "for 70 tokens in parts differ"),
        ("told", "for 70 tokens in parts differ"),
    ],
)
def test_one_that_agrees_on_a_few_small_tokens_and_differs_elsewhere_is_refused(what: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"Keeper cannot be served .* {words}"):
        check_mixers((mixer("sum"), mixer(what)))


class Wide(Keeper):
    """Returns two results per token, together wider than its input."""

    def forward(self, hidden: Tensor, cache_params: Any = None) -> Any:
        """[rows, T, 4] to [rows, T, 8] and [rows, T, 1]."""
        sums = super().forward(hidden, cache_params)
        return torch.cat((sums, sums), dim=-1), sums.sum(dim=-1, keepdim=True)


def test_a_layer_that_gives_more_than_it_takes_is_as_wide_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Piecewise graphs and compilers keep its output in a buffer of the same width as its input."""
    with torch.device("meta"):
        made = Mixer(0, Wide("sum"))
        made.module(torch.ones(1, 3, 4))
    seen: list[Tensor] = []

    def as_given(self: Mixer, rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows

    monkeypatch.setattr(Mixer, "__call__", as_given)
    hidden = torch.arange(20.0).view(1, 5, 4)
    several, one = made.module(hidden)
    assert (several.shape, one.shape, seen[0].shape) == ((1, 5, 8), (1, 5, 1), (5, 9))
    assert torch.equal(seen[0][:, :4], hidden[0]) and not seen[0][:, 4:].any()


class Scored(Keeper):
    """Returns a number per token as well, and takes arguments that it does not name."""

    def forward(self, hidden: Tensor, cache_params: Any = None, *args: Any) -> Any:
        """[rows, T, 4] to [rows, T, 4] and [rows, T]."""
        assert args == ()
        sums = super().forward(hidden, cache_params)
        return sums, sums.sum(dim=-1)


def test_a_result_of_one_number_per_token_comes_back_in_its_shape() -> None:
    with torch.device("meta"):
        Mixer(0, Scored("sum")).module(torch.ones(1, 3, 4))
    found = (torch.arange(24.0).view(2, 3, 4), torch.arange(6.0).view(2, 3))
    results = Results(torch.ones(2, 3, 4), found)
    several, one = results.unpack(results.pack(found))
    assert torch.equal(several, found[0].reshape(1, 6, 4)) and torch.equal(one, found[1].reshape(1, 6))


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_results_than_on_shapes_is_an_error(count: int) -> None:
    results = Results(torch.ones(1, 3, 4), (torch.ones(1, 3, 4), torch.ones(1, 3)))
    with pytest.raises(ValueError, match="zip"):
        results.pack((torch.ones(1, 3, 4),) * count)


def test_a_single_result_comes_back_by_itself_and_one_of_another_shape_is_none() -> None:
    hidden, found = torch.ones(1, 3, 4), torch.arange(12.0).view(1, 3, 4)
    alone, dropped = Results(hidden, (found,)), Results(hidden, (found, torch.ones(2), None))
    assert torch.equal(alone.unpack(alone.pack((found,))), found)
    kept, *others = dropped.unpack(dropped.pack((found, torch.ones(2), None)))
    assert torch.equal(kept, found) and others == [None, None]


class Mixes(Keeper):
    """Multiplies random numbers by a matrix, and tells `see` how large the products are."""

    def __init__(self, see: Callable[[float], None]) -> None:
        super().__init__("sum")
        self.matrix, self.see = nn.Parameter(torch.ones(64, 256)), see

    def forward(self, hidden: Tensor, cache_params: Any = None) -> Tensor:
        """[rows, T, 4]."""
        if not hidden.is_meta:
            self.see(float((torch.randn(100, 256) @ self.matrix.t()).std()))
        return super().forward(hidden, cache_params)


def test_random_weights_of_a_trial_keep_the_scale_of_values() -> None:
    """With values that grow by every layer, a limit or a rounding of one layer would hide all
    others."""
    seen: list[float] = []
    with torch.device("meta"):
        made = Mixer(0, Mixes(seen.append))
        made.module(torch.ones(1, 3, 4))
    check_mixers((made,))
    assert seen and all(0.5 < each < 2 for each in seen)


def test_layers_of_one_class_are_tried_each_by_what_it_is() -> None:
    mixers = mixer("sum"), mixer("forgets"), mixer("sum")
    check_mixers(mixers)
    assert [each.forgets for each in mixers] == [False, True, False]


def test_one_that_token_by_token_gives_something_else_is_refused() -> None:
    check_mixers((mixer("sum"),))
    with pytest.raises(ConfigError, match="Keeper cannot be served .* results token by token differ"):
        check_mixers((mixer("alone"),))


def test_one_whose_state_grows_is_refused() -> None:
    with pytest.raises(ConfigError, match="it keeps .*12,.* for fewer|it keeps .*36,.* for fewer"):
        mixer("long")


def test_only_modules_that_leave_a_state_in_transformers_cache_are_taken_over() -> None:
    model = tiny("granitemoehybrid")
    found = find_mixers(model)
    assert [type(each.module).__name__ for each in found] == ["GraniteMoeHybridMambaLayer"] * 2
    assert not find_mixers(tiny("gemma2"))


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a_model_with_states_does_not_embed(impl: str, tmp_path: Path) -> None:
    folder = save(qwen3_next(), tmp_path)
    with pytest.raises(ConfigError, match="Qwen3NextForCausalLM keeps states, and an embedding runs without"):
        TokenEngine(folder, model_impl=impl, task="embed")


def test_lengths_that_only_the_device_knows_are_refused(tmp_path: Path) -> None:
    steps = Steps(load(tiny("qwen3_next"), tmp_path))
    batch = steps.staged({1: [5, 6, 7]})
    batch.extend_seq_lens_cpu = None
    with pytest.raises(ValueError, match="wanted extend_seq_lens_cpu"):
        steps.model.state_layers[0].mix(torch.zeros(3, 64), batch, {})
