"""Makes the worker of an engine with speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sglcore.config.draft_kinds import DRAFT_KINDS
from sglcore.device.facts import Facts
from sglcore.device.package import resolve
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.draft_steps import DrafterParts, LookupSteps
from sglcore.runtime.speculative.drafter import Drafter
from sglcore.runtime.speculative.rejection import RULES, RejectionWorker
from sglcore.runtime.speculative.speculation_choice import Speculation, model_steps
from sglcore.runtime.speculative.target_features import FeatureModel
from sglcore.runtime.speculative.tree_worker import TreeWorker
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from sglcore.runtime.token_table import TokenTable
from sglcore.worker.model_worker import Limits


def make_drafter(
    speculation: Speculation,
    draft_runner: ModelRunner | None,
    draft_heads: Sequence[ModelRunner] = (),
    slots: int = 1,
) -> Drafter:
    """Return the drafter for requests in `slots` slots, slot 0 included.

    `draft_runner` runs its model, if it has one; `draft_heads` run the layers after the first if
    each layer proposes one token.
    """
    if not DRAFT_KINDS[speculation.kind].has_model:
        return lookup_steps(speculation.kind).make(speculation.tokens)
    assert draft_runner is not None
    sizes, is_exact = (speculation.tokens, speculation.tree), draft_runner.options.needs_exact_lengths
    return model_steps(speculation.kind).make(DrafterParts(*sizes, draft_runner, draft_heads, slots, is_exact))


def lookup_steps(kind: str) -> LookupSteps:
    """Return the `LookupSteps` of a kind of drafts without a model, a name in DRAFT_KINDS."""
    return resolve(DRAFT_KINDS[kind].steps)


def cells_of_drafts(speculation: Speculation, drafter: Drafter) -> int:
    """Return `Limits.draft_cells`: KV slots after the text that draft trees need; 0 for chains.

    A draft model without features also has a KV slot of the root; a frozen draft needs only the KV
    slots of nodes.
    """
    if speculation.tree is None:
        return 0
    has_own = model_steps(speculation.kind).writes_cells
    written = speculation.tree.cells + 1 - drafter.lookahead if has_own else 0
    return max(drafter.tokens, written)


def _against_overlap(speculation: Speculation, target: ModelRunner, draft: ModelRunner | None) -> str:
    """Return why a step must wait for the tokens accepted by the one before; empty if it need not:
    the host proposes tokens, or a forward of the target or the draft needs exact lengths there.
    """
    if not DRAFT_KINDS[speculation.kind].has_model and lookup_steps(speculation.kind).from_host:
        return f"{speculation.kind} proposes tokens on the host, which must know the text"
    for whose, runner in (("the target's", target), ("the draft's", draft)):
        if runner is None or not runner.options.needs_exact_lengths:
            continue
        names = [type(part).__name__ for part in runner.attn_backend.parts if part.facts.needs_exact_lengths]
        what = f"{whose} {' and '.join(names)}" if names else "the device"
        return f"{what} needs exact lengths on the host, which the tokens accepted by the step before decide"
    return ""


def make_speculative_worker(
    speculation: Speculation,
    runner: ModelRunner,
    draft_runner: ModelRunner | None,
    token_table: TokenTable,
    limits: Limits,
    facts: Facts,
    draft_heads: Sequence[ModelRunner] = (),
) -> SpeculativeWorker:
    """Return the worker that verifies draft tokens in its decode steps: a `TreeWorker` for trees, a
    `RejectionWorker` for a rule of RULES, otherwise a `SpeculativeWorker`.

    A step has decode rows or prefill rows, never both. Each step waits for the one before if a
    forward of the target or of the draft needs exact lengths on the host, or the host proposes
    tokens.
    """
    # Data-parallel shards agree on the number of draft tokens of each step.
    is_agreed = runner.extensions.ranks is not None and runner.extensions.ranks.has_shards
    has_model = DRAFT_KINDS[speculation.kind].has_model
    from_host = not has_model and lookup_steps(speculation.kind).from_host
    slots = limits.max_requests + 1
    drafter = make_drafter(speculation, draft_runner, draft_heads, slots)
    why = limits.against_overlap or _against_overlap(speculation, runner, draft_runner)
    limits = replace(
        limits,
        draft_tokens=drafter.tokens,
        draft_cells=cells_of_drafts(speculation, drafter),
        takes_proposals=from_host,
        draft_lengths=speculation.lengths if is_agreed else (),
        lookahead=drafter.lookahead,
        keeps_history=drafter.reads_history or limits.reads_history,
        allows_mixed_batches=False,
        # The positions of tokens to verify are their indices in the text.
        takes_mrope=False,
        can_overlap=limits.can_overlap and not why,
        against_overlap=why,
    )
    feature_size = runner.model.feature_size if isinstance(runner.model, FeatureModel) else None
    lengths = () if is_agreed else speculation.lengths
    given = (runner, token_table, limits, drafter, feature_size, lengths, facts.shares_host_memory)
    if speculation.tree is not None:
        return TreeWorker(speculation.tree, *given)
    if speculation.rule not in RULES:
        return SpeculativeWorker(*given)
    shape = speculation.draft_probs_shape(limits.max_requests, limits.vocab_size)
    draft_probs = torch.zeros(shape, device=token_table.last.device) if shape else None
    return RejectionWorker(RULES[speculation.rule], draft_probs, *given)
