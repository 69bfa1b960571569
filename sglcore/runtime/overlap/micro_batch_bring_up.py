"""The nested order of the bring-up for two-batch overlap: whether batches are split, from which
size, and their attention backends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.bring_up_steps import Again, NestedOrder
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.runtime.loaded_model import LoadedModel
from sglcore.runtime.memory.make_pools import Pools
from sglcore.runtime.overlap.measure_layers import layer_cost
from sglcore.runtime.overlap.micro_batch_cost import LayerCost
from sglcore.runtime.overlap.micro_batches import Halves
from sglcore.step.micro_batch_cut import THETA, CutTerms, Staggers

if TYPE_CHECKING:
    from sglcore.runtime.parallel.rank_groups import Groups

TOPIC = "two-batch overlap"
NEVER = 1 << 30
"""A threshold of rows that no step reaches: nothing is split."""


def cut_terms(
    config: EngineConfig,
    ledger: DecisionLedger,
    model: LoadedModel,
    pools: Pools,
    attention: AttentionBackend,
    device: torch.device,
    hisparse: HiSparseCoordinator | None = None,
    groups: Groups | None = None,
) -> CutTerms | None:
    """Return which batches run as two micro-batches; None if none do. Records the decision in the
    ledger.

    With `two_batch_overlap` "auto" it measures, and waits for all ranks.
    """
    asked = config.two_batch_overlap
    if asked == "off":
        if groups is not None:
            ledger.record(Row(TOPIC, asked, "off", "it was not requested", "--two-batch-overlap on or auto"))
        return None
    theta, where = _theta(model, pools, attention)
    reason = _reason_against(asked, groups) or _reason_of_shards(model, theta, pools, groups)
    if reason:
        ledger.record(Row(TOPIC, asked, "off", reason, "--two-batch-overlap off", downgrade=asked == "on"))
        return None
    terms, why = CutTerms(), "requested"
    if asked == "auto":
        assert groups is not None
        terms, why = measured_terms(
            layer_cost(config, model, groups, device), groups, config, model.config.num_hidden_layers
        )
    if terms is not None:
        terms = replace(terms, theta=theta, align=_align(theta, groups))
        if hisparse is not None:
            terms, where = replace(terms, least=NEVER), "the rows of prompts come from host memory by turns"
        why = f"{why}; {_told(terms)}; {where}"
    effective = "off" if terms is None else "on"
    other = "on" if terms is None else "off"
    ledger.record(Row(TOPIC, asked, effective, why, f"--two-batch-overlap {other}"))
    return terms


def _reason_against(asked: str, groups: Groups | None) -> str:
    """Return why no batch may be split; empty if some may."""
    if asked == "auto" and groups is None:
        return "a single rank waits for no other"
    return ""


def _reason_of_shards(model: LoadedModel, theta: float, pools: Pools, groups: Groups | None) -> str:
    """Return why data-parallel shards cannot agree on splits; empty if they can.

    Shards know of recurrent states and encoders, but of no other reason against splitting a
    request.
    """
    if groups is None or groups.place.topology.dp == 1 or theta or pools.states is not None or model.config.is_encoder:
        return ""
    return "data-parallel shards agree on where they are split, but do not know that blocks of rows cannot be split"


def _theta(model: LoadedModel, pools: Pools, attention: AttentionBackend) -> tuple[float, str]:
    """Return `CutTerms.theta`, how even micro-batches must be, and a description for the ledger."""
    from sglcore.runtime.attention.sparse.compressed import COMPRESSED

    if pools.states is not None:
        return 0.0, "between requests, because each keeps a state"
    if model.config.is_encoder:
        return 0.0, "between requests, because their tokens see each other in both directions"
    if COMPRESSED in attention.shape.features:
        return 0.0, "between requests, because blocks of rows cannot be split"
    return THETA, "inside a request if its boundaries would make the micro-batches too uneven"


def _align(theta: float, groups: Groups | None) -> int:
    """Return the number that must divide the tokens of the first micro-batch of a prefill.

    With whole experts, rows are divided among the ranks; an uneven split would pad both
    micro-batches. 1 if requests are not split, because their boundaries matter more, and with
    data-parallel shards, which agree on splits without this number.
    """
    if not theta or groups is None or groups.place.topology.dp > 1 or not groups.has_experts_whole:
        return 1
    return groups.attn_tp.size


def _told(terms: CutTerms) -> str:
    decode = "no decode" if terms.least_decode >= NEVER else f"decodes of {terms.least_decode} rows"
    prompts = "no prompts" if terms.least >= NEVER else f"prompts of {terms.least} tokens"
    even = f", in multiples of {terms.align}" if terms.align > 1 else ""
    ahead = f"the first micro-batch is {terms.staggers.prompts} and {terms.staggers.decode} waits ahead"
    return f"{prompts} and {decode} or more are split{even}, and {ahead}"


def measured_terms(cost: LayerCost, groups: Groups, config: EngineConfig, layers: int) -> tuple[CutTerms | None, str]:
    """Return the terms of all ranks, from the layer cost that each rank measured (None: no batch is
    faster as two micro-batches), and the measured numbers as text. Waits for all ranks.

    These are the largest thresholds and staggers of all ranks: a rank with different terms would
    make others enter collectives that it does not join.
    """
    rows = config.max_batch_tokens
    found = _for_all(cost.least_rows(rows) or NEVER, groups)
    decode = _for_all(cost.least_rows(config.max_requests) or NEVER, groups)
    numbers = (
        f"for a layer of {rows} rows, computing takes {cost.compute.seconds(rows) * 1e6:.0f} us, "
        f"{cost.share(rows):.0%} of it for any number of rows, "
        f"and waiting {cost.waiting.seconds(rows) * 1e6:.0f} us: {cost.whole(rows) * 1e6:.0f} us whole, "
        f"{cost.halves(rows) * 1e6:.0f} us as two micro-batches"
    )
    if found >= NEVER:
        return None, f"{numbers}; micro-batches are not faster"
    staggers = Staggers(
        _for_all(cost.stagger(rows, layers), groups), _for_all(cost.stagger(config.max_requests, layers), groups)
    )
    return CutTerms(least=found, least_decode=max(decode, found), staggers=staggers), numbers


def _for_all(rows: int, groups: Groups) -> int:
    """Return the maximum of `rows` over all ranks. Every rank calls this; waits for them."""
    return -groups.tp.least(-rows)


def second_ledger(cut_terms: CutTerms | None, ledger: DecisionLedger) -> DecisionLedger | None:
    """Return the ledger for decisions on the second micro-batch; None without micro-batches."""
    return None if cut_terms is None else ledger.about("second half:")


def halves(
    cut_terms: CutTerms | None, attention: AttentionBackend, second_attention: AttentionBackend | None
) -> Halves | None:
    """Return the runner of two micro-batches, each with an attention backend of its own; None if no
    batch is split.
    """
    if cut_terms is None or second_attention is None:
        return None
    if second_attention.hisparse is not None:
        second_attention.hisparse = second_attention.hisparse.second()
    return Halves((attention, second_attention), cut_terms)


TWO_BATCH_OVERLAP = NestedOrder(
    TOPIC,
    {
        "attention": (
            cut_terms,
            second_ledger,
            Again("second_attention", ("attention",), {"ledger": "second_ledger"}),
            halves,
        )
    },
    exports=("halves",),
)
"""How batches are split: the terms, and a second attention backend for the second micro-batch."""
