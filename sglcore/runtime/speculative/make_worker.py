"""Makes the worker of an engine with speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sglcore.device.facts import Facts
from sglcore.device.worker import Limits
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.block_drafts import BlockDrafter
from sglcore.runtime.speculative.chain_drafts import FeatureDrafter, StandaloneDrafter
from sglcore.runtime.speculative.drafter import Drafter
from sglcore.runtime.speculative.frozen_drafts import FrozenDrafter
from sglcore.runtime.speculative.mtp_drafts import MultiHeadDrafter
from sglcore.runtime.speculative.ngram_drafts import NgramDrafter
from sglcore.runtime.speculative.rejection import RULES, RejectionWorker
from sglcore.runtime.speculative.speculation_choice import DFLASH, FROZEN, SUFFIX, WITHOUT_MODEL, Speculation
from sglcore.runtime.speculative.target_features import FeatureModel
from sglcore.runtime.speculative.tree import TreeShape
from sglcore.runtime.speculative.tree_drafts import FrozenTreeDrafter, StandaloneTreeDrafter, TreeDrafter
from sglcore.runtime.speculative.tree_worker import TreeWorker
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from sglcore.runtime.token_table import TokenTable


def make_drafter(
    speculation: Speculation,
    draft_runner: ModelRunner | None,
    is_exact: bool = False,
    draft_heads: Sequence[ModelRunner] = (),
    slots: int = 1,
) -> Drafter:
    """Return the drafter for requests in `slots` slots.

    `draft_runner` runs its model, if it has one; `draft_heads` run the layers after the first if
    each layer proposes one token. `is_exact`: the host must give exact lengths.
    """
    if speculation.kind in WITHOUT_MODEL:
        return NgramDrafter(speculation.tokens)
    assert draft_runner is not None
    model: Any = draft_runner.model
    if speculation.tree is not None:
        return make_tree_drafter(speculation, speculation.tree, draft_runner, model)
    if speculation.aux_layers is None:
        return StandaloneDrafter(draft_runner, speculation.tokens)
    if speculation.kind == DFLASH:
        return BlockDrafter(draft_runner, speculation.tokens, model, is_exact)
    if draft_heads:
        return MultiHeadDrafter((draft_runner, *draft_heads), slots, model)
    if speculation.kind == FROZEN:
        return FrozenDrafter(draft_runner, speculation.tokens, model.feature_size)
    return FeatureDrafter(draft_runner, speculation.tokens, model.project)


def make_tree_drafter(speculation: Speculation, shape: TreeShape, runner: ModelRunner, model: Any) -> Drafter:
    """Return a drafter of trees."""
    if speculation.aux_layers is None:
        return StandaloneTreeDrafter(runner, speculation.tokens).shaped(shape)
    if speculation.kind == FROZEN:
        return FrozenTreeDrafter(runner, shape, model.feature_size)
    return TreeDrafter(runner, speculation.tokens, model.project).shaped(shape)


def cells_of_drafts(speculation: Speculation, drafter: Drafter) -> int:
    """Return `Limits.draft_cells`.

    A draft model without features also has a KV slot of the root; a frozen draft needs only the KV
    slots of nodes.
    """
    if speculation.tree is None:
        return 0
    written = 0 if speculation.kind == FROZEN else speculation.tree.cells + 1 - drafter.lookahead
    return max(drafter.tokens, written)


def make_speculative_worker(
    speculation: Speculation,
    runner: ModelRunner,
    draft_runner: ModelRunner | None,
    token_table: TokenTable,
    limits: Limits,
    facts: Facts,
    draft_heads: Sequence[ModelRunner] = (),
    is_agreed: bool = False,
) -> SpeculativeWorker:
    """Return the worker that verifies draft tokens in its decode steps.

    `is_agreed`: data-parallel shards agree on the number of draft tokens of each step.
    A step has decode rows or prefill rows, never both. If a forward needs host lengths, or the host
    proposes tokens, each step waits for the one before.
    """
    from_host = speculation.kind == SUFFIX
    slots = limits.max_requests + 1
    drafter = make_drafter(speculation, draft_runner, facts.needs_host_lengths, draft_heads, slots)
    limits = replace(
        limits,
        draft_tokens=drafter.tokens,
        draft_cells=cells_of_drafts(speculation, drafter),
        takes_proposals=from_host,
        draft_lengths=speculation.lengths if is_agreed else (),
        lookahead=drafter.lookahead,
        keeps_history=drafter.reads_history,
        allows_mixed_batches=False,
        # The positions of tokens to verify are their indices in the text.
        takes_mrope=False,
        can_overlap=limits.can_overlap and not facts.needs_host_lengths and not from_host,
    )
    feature_size = runner.model.feature_size if isinstance(runner.model, FeatureModel) else None
    lengths = () if is_agreed else speculation.lengths
    given = (runner, token_table, limits, drafter, feature_size, lengths, facts.shares_host_memory)
    if speculation.tree is not None:
        return TreeWorker(speculation.tree, *given)
    if speculation.rule not in RULES:
        return SpeculativeWorker(*given)
    shape = speculation.laws_shape(limits.max_requests, limits.vocab_size)
    laws = torch.zeros(shape, device=token_table.last.device) if shape else None
    return RejectionWorker(RULES[speculation.rule], laws, *given)
