"""By what parts of transformers' classes are known, one condition at a time: norms, gated blocks,
embeddings, and functions that rotate queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from sglcore.models.transformers_backend.layer_trace import Trace, _heads, _tensors
from sglcore.models.transformers_backend.module_probes import (
    embedding_scale,
    gated_block_of,
    is_linear,
    is_same,
    may_be_block,
    may_be_norm,
    only,
    tried,
)
from sglcore.models.transformers_backend.rotary_adapter import Turn, _turning_name, put_turns
from sglcore.models.transformers_backend.router_detection import routing_of
from sglcore.runtime.kernels.table import KernelTable
from tests.models.transformers.test_transformers_replacements import halves
from tests.models.transformers.test_transformers_routers import Choice, largest

# -- norms, blocks, embeddings
# --------------------------------------------------------------------------------------------------


def norm(*shape: int, **more: Any) -> nn.Module:
    """A module with a weight, and perhaps other parts."""
    made = nn.Module()
    made.weight = nn.Parameter(torch.ones(shape))
    for name, each in more.items():
        if isinstance(each, Tensor) and not isinstance(each, nn.Parameter):
            made.register_buffer(name, each)
        else:
            setattr(made, name, each)
    return made


@pytest.mark.parametrize(
    ("module", "is_norm"),
    [
        (norm(4), True),
        (norm(4, eps=1e-5), True),
        (norm(4, 4), False),
        (norm(4, bias=nn.Parameter(torch.ones(4))), False),
        (norm(4, mean=torch.ones(4)), False),
        (norm(4, inner=nn.Identity()), False),
        (nn.Identity(), False),
    ],
)
def test_a_norm_has_one_vector_and_nothing_else(module: nn.Module, is_norm: bool) -> None:
    assert may_be_norm(module) is is_norm


class Sums(nn.Linear):
    """A linear layer that is a class of its own."""

    more = 0.0

    def forward(self, input: Tensor) -> Tensor:
        """The product, and `more`."""
        return super().forward(input) + self.more


class More(Sums):
    """One that adds something."""

    more = 1e-3


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_torchs_or_gives_the_same(bias: bool) -> None:
    assert is_linear(nn.Linear(7, 9, bias)) and is_linear(Sums(7, 9, bias))
    assert not is_linear(More(7, 9, bias)) and not is_linear(nn.Embedding(7, 9)) and not is_linear(nn.Identity())


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.full((2,), 1 + 5e-6), True),
        (torch.ones(2), torch.full((2,), 1 + 1e-4), False),
        (torch.ones(2).bfloat16(), torch.ones(2).bfloat16(), True),
        (torch.ones(2).bfloat16(), torch.full((2,), 1 + 2**-7).bfloat16(), False),
        (torch.ones(2).half(), torch.full((2,), 1 + 2**-10).half(), False),
        (torch.ones(2).half(), torch.ones(2), False),
        (torch.ones(2).double(), torch.ones(2), False),
        (torch.ones(2, 1), torch.ones(2), False),
        (torch.ones(1), torch.ones(2), False),
    ],
    ids=str,
)
def test_results_are_the_same_to_the_bit_in_half_types(found: Tensor, wanted: Tensor, same: bool) -> None:
    assert is_same(found, wanted) is same


@pytest.mark.parametrize("padding", [None, 0, 150, -1])
def test_a_row_for_padding_matters_in_training_alone(padding: int | None) -> None:
    def initialize(module: nn.Module) -> None:
        pytest.fail("it has no buffers")

    assert embedding_scale(nn.Embedding(200, 8, padding_idx=padding), torch.bfloat16, initialize) == 1.0


class Gated(nn.Module):
    """A block of two or three linear layers; more of them, or other parts, if asked for."""

    def __init__(
        self, joint: bool = False, bias: tuple[bool, bool, bool] = (False, False, False), **more: nn.Module
    ) -> None:
        super().__init__()
        first, second, last = bias
        self.joint = joint
        self.gate = nn.Linear(16, 48 if joint else 24, first)
        if not joint:
            self.up = nn.Linear(16, 24, second)
        self.down = nn.Linear(24, 16, last)
        for name, each in more.items():
            setattr(self, name, each)

    def forward(self, x: Tensor) -> Tensor:
        """[..., 16] to [..., 16]."""
        gate, up = self.gate(x).chunk(2, dim=-1) if self.joint else (self.gate(x), self.up(x))
        return self.down(silu(gate) * up)


@pytest.mark.parametrize(
    ("block", "roles"),
    [
        (Gated(), ("gate", "up", "down")),
        (Gated(True), ("gate", "down")),
        (Gated(True, (True, False, False)), ("gate", "down")),
        (Gated(False, (True, True, False)), ("gate", "up", "down")),
        (Gated(False, (False, False, True)), ("gate", "up", "down")),
        (Gated(False, (True, False, False)), None),
        (Gated(act=nn.SiLU()), ("gate", "up", "down")),
        (Gated(other=nn.Linear(16, 24)), None),
        (Gated(other=nn.LayerNorm(4)), None),
        (Gated(other=Sums(16, 24)), None),
    ],
)
def test_a_gated_block_has_two_or_three_layers_with_biases_alike(
    block: nn.Module, roles: tuple[str, ...] | None
) -> None:
    found = gated_block_of(block, torch.bfloat16)
    assert found == (None if roles is None else (roles, KernelTable.silu_and_mul))
    assert may_be_block(block) or roles is None


def test_nothing_or_two_forms_that_fit_are_none() -> None:
    assert (only([]), only([3]), only([3, 3]), only(iter("a"))) == (None, 3, None, "a")


@pytest.mark.parametrize("error", [TypeError, RuntimeError, AttributeError, ValueError, KeyError, IndexError])
def test_a_module_that_fails_or_gives_no_tensor_gives_nothing(error: type[Exception]) -> None:
    def fails(x: Tensor) -> Tensor:
        raise error(x)

    x = torch.ones(2, requires_grad=True)
    assert tried(fails, x) is None and tried(lambda x: (x,), x) is None
    found = tried(lambda x: x * 2, x)
    assert found is not None and not found.requires_grad


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("chosen", "is_known"), [(3, True), (8, False)])
def test_a_router_for_which_two_forms_give_the_same_is_none(chosen: int, is_known: bool, normalize: bool) -> None:
    """Of all experts the weights sum to one, divided by their sum or not."""
    form = routing_of(Choice(lambda logits: largest(logits, normalize, chosen)), torch.float32)
    assert (form is not None) is is_known
    assert form is None or form.rules.normalize is normalize


# -- rotation
# --------------------------------------------------------------------------------------------------


def heads(*shape: int) -> Tensor:
    """Heads without contents."""
    return torch.empty(shape, device="meta")


def called(*more: Any, q: Tensor | None = None, sin: Tensor | None = None, **named: Any) -> Turn:
    """A rotating function that was called once in a walk."""
    turn, cos = Turn(halves, {}), heads(1, 5, 8)
    turn(heads(1, 4, 5, 8) if q is None else q, heads(1, 2, 5, 8), cos, cos if sin is None else sin, *more, **named)
    return turn


@pytest.mark.parametrize(
    ("turn", "is_kernels"),
    [
        (called(), True),
        (called(unsqueeze_dim=1), True),
        (called(unsqueeze_dim=2), False),
        (called(position_ids=None), False),
        (called(None), False),
        (called(1), False),
        (called(q=heads(4, 5, 8)), False),
        (called(q=heads(1, 4, 5, 16)), False),
        (called(sin=heads(1, 5, 4)), False),
    ],
)
def test_a_rotation_with_other_arguments_is_the_classes_own(turn: Turn, is_kernels: bool) -> None:
    assert turn.is_kernels("halves", Trace(), []) is is_kernels


def test_every_call_of_a_rotation_is_asked_about() -> None:
    turn = called()
    turn(heads(1, 4, 5, 8), heads(1, 2, 5, 8), heads(1, 5, 8), heads(1, 5, 8), unsqueeze_dim=2)
    assert not turn.is_kernels("halves", Trace(), [])


@pytest.mark.parametrize(
    ("attended", "is_direct"),
    [
        (lambda q, k: [(q, k, heads(1, 2, 5, 8))], True),
        (lambda q, k: [(q, k, heads(1, 2, 5, 4))], False),
        (lambda q, k: [(q, k, heads(1, 2, 5, 16))], False),
        (lambda q, k: [(q * 1, k, heads(1, 2, 5, 8))], False),
        (lambda q, k: [(q, k * 1, heads(1, 2, 5, 8))], False),
        (lambda q, k: [(k, q, heads(1, 2, 5, 8))], False),
        (lambda q, k: [(q, k, heads(1, 2, 5, 8))] * 2, False),
        (lambda q, k: [], False),
    ],
)
def test_a_rotation_may_wait_if_attention_takes_its_results_as_they_are(
    attended: Callable[[Tensor, Tensor], Any], is_direct: bool
) -> None:
    turn, cos = Turn(halves, {}), heads(1, 5, 8)
    turn.settle("halves", attended(*turn(heads(1, 4, 5, 8), heads(1, 2, 5, 8), cos, cos)), Trace())
    assert turn.is_direct is is_direct and turn.norms == ()
    assert (turn._size, turn._heads) == (8, (4, 2, 8))


def forward(names: str, **own: Callable[..., Any]) -> FunctionType:
    """A forward that calls functions by names in its globals."""
    scope: dict[str, Any] = {}
    calls = "\n".join(f"    q, k = {name}(q, k, cos, sin)" for name in names.split())
    exec(f"def forward(self, q, k, cos, sin):\n{calls}\n    return q, k", own, scope)
    return scope["forward"]


def same(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate nothing."""
    return q, k


def of_five(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by one more argument."""
    return halves(q, k, cos, sin)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (forward("turn", turn=halves), "turn"),
        (forward("turn same", turn=halves, same=same), "turn"),
        (forward("turn again", turn=halves, again=halves), None),
        (forward("same", same=same), None),
        (forward("turn", turn=of_five), None),
        (forward("turn"), None),
    ],
)
def test_a_forward_rotates_by_one_function(made: FunctionType, name: str | None) -> None:
    assert _turning_name(made) == name


class Attends(nn.Module):
    """An attention module with keyword arguments that have defaults."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, times: float = 3.0, *, more: float = 2.0) -> Any:
        """Rotate, and scale the queries."""
        q, k = halves(q, k, cos, sin)
        return q * times * more, k


def test_a_forward_keeps_its_defaults_and_its_class_its_forward() -> None:
    own, other, made = Attends(), Attends(), Attends.forward
    turns = put_turns([own, nn.Linear(2, 2)])
    assert list(turns) == [own] and "forward" not in vars(other) and Attends.forward is made
    turns[own]._calls = None
    q, k, table = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 5, 8)
    for given in ({}, {"more": 1.0}, {"times": 1.0}):
        for found, wanted in zip(own(q, k, table, table, **given), other(q, k, table, table, **given), strict=True):
            torch.testing.assert_close(found, wanted)


# -- what a walk records
# --------------------------------------------------------------------------------------------------


def test_tensors_of_an_operation_are_also_those_in_lists() -> None:
    first, second, third = (torch.empty(1) for _ in range(3))
    found = list(_tensors((first, [second, 3], (third, None), 2.0, None, "x")))
    assert [id(each) for each in found] == [id(first), id(second), id(third)]


@pytest.mark.parametrize("tokens", [2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_heads_are_counted_before_and_after_they_are_transposed(count: int, tokens: int) -> None:
    rows = torch.empty(1, tokens, count, 8)
    assert _heads(rows) == (count, False) and _heads(rows.transpose(1, 2)) == (count, True)
    assert _heads(torch.empty(1, tokens, 8)) == (None, False)


@pytest.mark.parametrize(
    ("reads", "is_read"),
    [
        (lambda x: x + 1, True),
        (lambda x: torch.cat([x, x]), True),
        (lambda x: x.view(-1)[:2] * 2, True),
        (lambda x: x.view(-1), False),
        (lambda x: x.transpose(0, 1), False),
        (lambda x: torch.add(torch.ones(2, 2), x, alpha=2), True),
        (lambda x: None, False),
    ],
)
def test_a_tensor_is_read_by_an_operation_and_not_by_a_view(reads: Callable[[Tensor], object], is_read: bool) -> None:
    x, trace = torch.ones(2, 2), Trace()
    with trace.watching([]):
        reads(x)
    assert trace.is_read(x) is is_read
    assert not trace.is_read(x, after=99)
