"""Ledger rows that say which kernels serve this model, so that no fallback is silent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from sglcore.core.ledger import Row
from sglcore.runtime.bring_up import LoadedModel
from sglcore_cpu.arena import huge_pages
from sglcore_cpu.kernels.operands import SERVED
from sglcore_cpu.kernels.packed import ClosedWeight
from sglcore_cpu.kernels.table import is_native

PLAIN = "plain"
NATIVE_EXPERTS = Row("experts", "auto", "native", "only the chosen experts are computed", "--kernels torch")


def kernel_rows(model: LoadedModel, graph: str) -> list[Row]:
    """Return ledger rows that name the kernels of the linear layers and, for an MoE model, of the
    experts. `graph` is the resolved graph kind, such as "native" or "compiled"
    (`Facts.graph_kind`), not the setting."""
    rows = [linear_row(model, graph)]
    config = model.config
    if config.moe is not None:
        by_torch = not is_native(model.kernels) or model.dtype not in SERVED
        rows.append(experts_row(model.dtype, graph) if by_torch else NATIVE_EXPERTS)
    return rows


def linear_row(model: LoadedModel, graph: str) -> Row:
    """Return the row of the linear layers: in how many of them the weight is packed, and how, which
    determines the kernels. `graph`: as in `kernel_rows`."""
    layers = model.weights.linears
    forms = Counter(_form(layer.weight) for layer in layers)
    told = ", ".join(f"{count} of {len(layers)} {form}" for form, count in forms.items())
    if PLAIN not in forms:
        return Row("linear", "auto", "packed", told, "--kernels torch")
    if graph == "compiled":
        return Row("linear", "auto", PLAIN, "a compiler reads plain weights", "--graph native")
    if model.dtype is torch.float16:
        return Row("linear", "auto", PLAIN, "the native kernels do not compute in float16", "--dtype bfloat16")
    return Row("linear", "auto", "packed" if len(forms) > 1 else PLAIN, told, "--kernels auto")


def _form(weight: torch.Tensor) -> str:
    if isinstance(weight, ClosedWeight):
        return weight.form.name
    return "bf16 blocks of torch's library" if weight.is_mkldnn else PLAIN


def pages_row(root: Path = Path("/")) -> Row:
    """Return the row that says whether the system gives weights huge pages. `root`: the folder that
    system paths start from. No setting of the engine requests them, so their absence is no
    downgrade."""
    granted, why = huge_pages(root)
    remedy = "" if granted else "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Row("pages", "auto", "huge" if granted else "4 KiB", why, remedy)


def experts_row(dtype: torch.dtype, graph: str) -> Row:
    """Return the row of experts that run on torch's kernels: grouped products, or the reference in
    compiled graphs (`graph` is "compiled") of a dtype other than bfloat16."""
    if graph == "compiled" and dtype is not torch.bfloat16:
        reason = f"a compiler takes grouped products of bfloat16 only, not {dtype}"
        return Row("experts", "auto", "reference in graphs", reason, "--graph off, or --dtype bfloat16")
    return Row("experts", "auto", "grouped", "only the chosen experts are computed", "--graph compiled in float32")
