"""Selects the attention backend: the requested one, or the first that supports the model; each
refusal has a reason."""

from __future__ import annotations

from collections.abc import Mapping

from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.package import Ref, resolve
from sglcore_mlx.attention.contract import AttentionFacts, DecodeAttention


def select_attention(
    candidates: Mapping[str, Ref],
    asked: str | None,
    *,
    dtype: str,
    head_dims: tuple[int, ...],
    page_size: int,
    compute: str,
    has_latent: bool = False,
    has_blocks: bool = False,
    ledger: DecisionLedger,
) -> type[DecodeAttention]:
    """Return the class of the requested backend, or of the first in `candidates` that supports the
    model, and record the decision in the ledger. `candidates`: class by name, as `module:name`;
    `asked` None: no request; `compute`: the kind of hardware. Raises ConfigError if no backend
    supports the model, or the requested one does not."""
    if asked is not None and asked not in candidates:
        raise ConfigError(f"there is no attention backend {asked!r}", wanted=f"one of {', '.join(candidates)}")
    refused: list[str] = []
    for name in candidates if asked is None else (asked,):
        kind: type[DecodeAttention] = resolve(candidates[name], "mlx")
        reason = refusal(kind.facts, dtype, head_dims, page_size, compute, has_latent, has_blocks)
        if not reason:
            why = "requested" if asked else "; ".join(refused) or "the first that serves this model"
            ledger.record(Row("attention", asked or "auto", name, why, "--attention-backend"))
            return kind
        refused.append(f"{name}: {reason}")
    remedy = "leave --attention-backend out" if asked else "choose another dtype or page size"
    raise ConfigError(f"no attention backend serves this model here: {'; '.join(refused)}", remedy=remedy)


def refusal(
    facts: AttentionFacts,
    dtype: str,
    head_dims: tuple[int, ...],
    page_size: int,
    compute: str,
    has_latent: bool = False,
    has_blocks: bool = False,
) -> str:
    """Return why a backend with these facts does not support the model, as a phrase; empty if it
    does. `compute`: the kind of hardware; `has_latent`: the model has latent attention;
    `has_blocks`: it has compressed blocks."""
    if has_blocks != facts.takes_blocks:
        return "takes no compressed blocks" if has_blocks else "takes only models with compressed blocks"
    if has_latent and not facts.takes_latent:
        return "does not take latent entries"
    if facts.compute is not None and compute not in facts.compute:
        return f"runs on {', '.join(facts.compute)}, not {compute}"
    if facts.dtypes is not None and dtype not in facts.dtypes:
        return f"takes {', '.join(facts.dtypes)}, not {dtype}"
    unfit = [size for size in head_dims if facts.head_dims is not None and size not in facts.head_dims]
    if unfit:
        return f"does not take heads of {unfit[0]}"
    if facts.page_sizes is not None and page_size not in facts.page_sizes:
        return f"takes pages of {', '.join(map(str, facts.page_sizes))}, not {page_size}"
    return ""
