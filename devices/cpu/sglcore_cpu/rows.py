"""What the processor's kernels do with this model, as rows of the ledger: nothing falls back unseen."""

from __future__ import annotations

from typing import Any

import torch

from sglcore.device.ledger import Row
from sglcore_cpu.kernels import takes_grouped


def kernel_rows(model: Any, graph: str) -> list[Row]:
    """Rows for the entries whose implementation depends on the model's dtype and shapes."""
    rows = [linear_row(model, graph)]
    config = model.config
    if config.moe is not None:
        rows.append(experts_row(config.hidden_size, config.moe.intermediate_size, model.dtype, graph))
    if not config.is_encoder and model.cos_sin.shape[1] != config.head_dim:
        reason = f"{model.cos_sin.shape[1]} of {config.head_dim} elements of a head are rotated"
        rows.append(Row("rotary", "auto", "reference", reason, "none on this device"))
    return rows


def linear_row(model: Any, graph: str) -> Row:
    """Whether the linear layers' weights are packed."""
    layers = model.weights.linears
    packed = sum(layer.weight.is_mkldnn for layer in layers)
    if packed:
        return Row(
            "linear",
            "auto",
            "packed",
            f"{packed} of {len(layers)} weights laid out for bfloat16 instructions",
            "--dtype float32",
        )
    if graph != "off":
        return Row("linear", "auto", "plain", "a compiler reads plain weights", "--graph off")
    if model.dtype is not torch.bfloat16:
        return Row("linear", "auto", "plain", f"weights of {model.dtype} are not packed", "--dtype bfloat16")
    return Row("linear", "auto", "plain", "this processor lacks bfloat16 instructions", "none on this processor")


def experts_row(hidden_size: int, intermediate_size: int, dtype: torch.dtype, graph: str) -> Row:
    """Which product serves the experts."""
    if graph != "off" and dtype is not torch.bfloat16:
        reason = f"a compiler takes grouped products of bfloat16 only, not {dtype}"
        return Row("experts", "auto", "reference in graphs", reason, "--graph off, or --dtype bfloat16")
    if takes_grouped(hidden_size, intermediate_size, dtype):
        return Row("experts", "auto", "grouped", "only the chosen experts are computed", "--graph compiled in float32")
    reason = f"rows of {hidden_size} and {intermediate_size} elements are not multiples of 16 bytes"
    return Row("experts", "auto", "reference", reason, "a dtype or model whose rows are")
