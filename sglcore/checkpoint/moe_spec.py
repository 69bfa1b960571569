"""What a family of models adds to its `MoeConfig`: the form of its experts, and of their router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sglcore.checkpoint.model_config import EXPERT_PARTS

Form: TypeAlias = Literal["gated", "limited", "clamped", "relu2"]
"""What an expert computes of its input x:

- gated: down(silu(gate(x)) * up(x)).
- limited: the same with gate at most `limit`, and up from -`limit` to `limit`.
- clamped: with biases and a clamped activation, as `KernelTable.clamped_moe`; the rows of gate and
  up alternate.
- relu2: down(max(up(x), 0)^2).
"""

Score: TypeAlias = Literal["softmax", "group_limited", "sigmoid", "sqrtsoftplus", "table"]
"""What selects and weighs the K experts of a token, of the logits of a linear layer:

- softmax: the largest probabilities.
- group_limited: the same of float32 logits, only among the groups with the largest probabilities.
- sigmoid: the largest sigmoid plus the expert's bias `e_score_correction_bias`, within the best
  groups; the weight is without the bias. Float32 logits.
- sqrtsoftplus: the largest sqrt(softplus(logit)) plus that bias, the weight without it.
- table: the weights of sqrtsoftplus; the experts of each token id are in the table `tid2eid`
  [vocab, K].
"""


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The form of a layer's experts, and where the checkpoint has their weights."""

    form: Form = "gated"
    """What an expert computes."""
    parts: tuple[str, ...] = EXPERT_PARTS
    """The projections of each of `experts`; or two names, each of one weight for all experts: gate
    over up, and down."""
    alpha: float = 0.0
    """clamped: the factor in the gate's sigmoid."""
    limit: float = 0.0
    """limited, clamped: the bound of the factors."""
    latent: int = 0
    """relu2: the width between `fc1_latent_proj` before the experts and `fc2_latent_proj` after
    their sum. 0: the hidden size, without these layers."""


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How a router chooses experts."""

    score: Score = "softmax"
    """What selects and weighs the experts."""
    gate: str = "gate"
    """The name of the linear layer that makes the logits."""
    bias: bool = False
    """Whether that layer has a bias; softmax only."""
