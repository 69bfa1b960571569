"""The parts of experts for tensor parallel: each rank has a part of the intermediate size of every
expert, for all ways in which a checkpoint stores experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglcore.checkpoint.model_config import EXPERT_PARTS, MoeConfig
from sglcore.checkpoint.moe_spec import ExpertSpec
from sglcore.checkpoint.parallel.tensor_parallel import Range

GROUP = 32
"""Elements of a row with one scale in MXFP4 (OCP Microscaling Formats 1.0)."""
CutTensor = Callable[..., None]
"""`cut(name, whole, *ranges, dim=0)`: this rank has these ranges of one dimension of a tensor below
the block's scope."""


def both(part: Range, size: int) -> tuple[Range, Range]:
    """Return two ranges: the rows of gate and those of up that belong to `part`, a range of the
    intermediate size, in a weight with `size` rows of gate, then `size` rows of up."""
    return part, (part[0] + size, part[1] + size)


def cut_form(cut: CutTensor, moe: MoeConfig, spec: ExpertSpec, part: Range) -> None:
    """Record, with `cut`, that this rank has the range `part` of the intermediate size of each
    expert. `cut` is called for every tensor name under which a checkpoint may store experts of
    `spec.form`."""
    experts, size = moe.num_experts, moe.intermediate_size
    if spec.form == "relu2":
        cut_ungated(cut, experts, size, part)
    elif spec.form == "clamped":
        cut_clamped(cut, size, part)
    else:
        cut_experts(cut, experts, size, part, spec.parts)


def cut_experts(cut: CutTensor, experts: int, size: int, part: Range, parts: Sequence[str] = EXPERT_PARTS) -> None:
    """Record, by calls `cut(name, whole, *ranges, dim=0)`, that this rank has the range `part` of
    the intermediate size `size` of gated experts, stored one by one, all in one tensor, or as two
    `parts`."""
    down = parts[-1]
    if len(parts) == 2:
        cut(f"{parts[0]}.weight", 2 * size, *both(part, size), dim=1)
        cut(f"{down}.weight", size, part, dim=2)
        return
    cut("experts.gate_up_proj", 2 * size, *both(part, size), dim=1)
    _cut_each(cut, experts, size, part, parts[:2], down)


def cut_ungated(cut: CutTensor, experts: int, size: int, part: Range) -> None:
    """Record, by calls `cut(name, whole, *ranges, dim=0)`, the range `part` of the intermediate
    size `size` of experts without gates, stored one by one or all in one tensor."""
    cut("experts.up_proj", size, part, dim=1)
    _cut_each(cut, experts, size, part, ("up_proj",), "down_proj")


def _cut_each(cut: CutTensor, experts: int, size: int, part: Range, rows: Sequence[str], down: str) -> None:
    cut("experts.down_proj", size, part, dim=2)
    for expert in range(experts):
        for name in rows:
            cut(f"experts.{expert}.{name}.weight", size, part)
        cut(f"experts.{expert}.{down}.weight", size, part, dim=1)


def cut_clamped(cut: CutTensor, size: int, part: Range) -> None:
    """Record, by calls `cut(name, whole, *ranges, dim=0)`, the range `part` of the intermediate
    size `size` of experts with biases and interleaved gate and up: plain, [experts, inputs,
    outputs], or as codes, [experts, outputs, groups of inputs]. With codes, `part` is at multiples
    of GROUP."""
    pairs = 2 * part[0], 2 * part[1]
    cut("experts.gate_up_proj", 2 * size, pairs, dim=2)
    cut("experts.gate_up_proj_bias", 2 * size, pairs, dim=1)
    cut("experts.down_proj", size, part, dim=1)
    for kind in ("blocks", "scales"):
        cut(f"experts.gate_up_proj_{kind}", 2 * size, pairs, dim=1)
        cut(f"experts.down_proj_{kind}", size // GROUP, (part[0] // GROUP, part[1] // GROUP), dim=2)
