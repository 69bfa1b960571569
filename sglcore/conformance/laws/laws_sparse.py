"""Laws of level C2 (runner) over models with cache entries other than keys and values.

Latent attention with an indexer, and compressed attention with a sliding window. The laws test the
backend and kernels of the package for such layers, or the core's if the package has none.
"""

from __future__ import annotations

from sglcore.conformance.inputs.kit_models_sparse import SPARSE_MODELS
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import Law
from sglcore.conformance.laws.laws_memory import prefix_hits, retraction
from sglcore.conformance.laws.laws_runner import (
    c2,
    check_computes,
    check_replayed,
    open_case,
    overlap_is_sequential,
    run_in_turn,
)
from sglcore.conformance.mutant import TORCH
from sglcore.conformance.mutants import mutants_sparse as sparse
from sglcore.conformance.mutants import mutants_worker as worker
from sglcore.conformance.mutants.mutants_attention import FORGETS_LENGTHS
from sglcore.conformance.target import Target

LENGTHS = (41, 3, 16, 5, 64, 1)
"""Prompt lengths around the sizes of blocks and pages, and longer than what an indexer chooses and
a window holds."""
ROWS = frozenset({"rows"})
FEW_ROWS = '{"device_buffer_size": 5, "host_to_device_ratio": 1000}'
"""A value of `--hisparse` with a device buffer of 5 entries: the number that the kit's models read
for a token."""
BUCKETS = (4,)
TOKENS = (16,)


def rows_by_pages(trial: Trial) -> None:
    """Run prompts whole and in chunks that are no multiple of a block, together with others that
    join later, over pages in any order. Raises LawBroken where log-probabilities differ from the
    reference's. Raises NotApplicable if the device cannot run the case's model."""
    harness = open_case(trial)
    trial.compare(harness, harness.run(random_prompts(21, LENGTHS), 6, score_prompts=True))
    for chunk, scramble in ((7, 1), (33, 2)):
        how = {"chunk": chunk, "scramble": scramble, "stagger": 1}
        trial.compare(harness, harness.run(random_prompts(22, LENGTHS), 9, score_prompts=True, **how))


def slots_and_pages_go_on(trial: Trial) -> None:
    """Run more requests than slots, so that later ones use slots and pages that earlier requests
    left. Raises LawBroken where log-probabilities differ from the reference's. Raises NotApplicable
    if the device cannot run the case's model."""
    harness = open_case(trial)
    session = harness.session(stagger=1)
    for seed in (23, 24):
        trial.compare(harness, session.run(random_prompts(seed, (19, 2, 35, 8, 50, 4, 27, 11, 17, 33)), 8))


def replayed_rows(trial: Trial) -> None:
    """Replay plans that are refreshed in place, for fewer requests than were captured and for the
    same number, with prompts in between; the case is `kind/model`. Raises LawBroken where
    log-probabilities differ from the reference's, or if nothing was replayed. Raises NotApplicable
    if the device cannot run the case's model."""
    kind, _, model = trial.case.partition("/")
    check_computes(trial.target, model)
    with trial.opened(model, graph=kind, graph_buckets=BUCKETS, graph_token_buckets=TOKENS) as harness:
        for lengths in ((3, 30, 15, 40), (6,), (11, 31)):
            trial.compare(harness, harness.run(random_prompts(len(lengths), lengths), 6, stagger=1, chunk=16))
        check_replayed(harness, kind, BUCKETS)


def rows_in_host_memory(trial: Trial) -> None:
    """Keep only the number of cache entries on the device that one token reads, and the rest on the
    host (`--hisparse`): prompts in chunks, graph replays if the case names a graph, one request
    after the other in the same slot. Raises LawBroken where log-probabilities differ from the
    reference's. Raises NotApplicable if the device cannot run the case's model."""
    kind, _, model = trial.case.partition("/")
    check_computes(trial.target, model)
    lengths, count = (3, 26), 3
    given = {"graph": kind, "graph_buckets": (1,), "graph_token_buckets": TOKENS, "max_requests": 1}
    with trial.opened(model, hisparse=FEW_ROWS, **given) as harness:
        trial.compare(harness, harness.run(random_prompts(31, lengths), count, chunk=16))
        if kind != "off":
            check_replayed(harness, kind, (1,))


def runners_in_turn(trial: Trial) -> None:
    """Run both sparse models and a dense one in one process, in alternating steps, each with its
    own pools, plans and backend. Raises LawBroken where log-probabilities differ from the
    reference's. Raises NotApplicable if the device cannot run one of the models."""
    check_computes(trial.target, *SPARSE_MODELS)
    with trial.opened("latent") as one, trial.opened("compressed") as two, trial.opened("dense") as three:
        run_in_turn(trial, one, two, three)


def by_graph(target: Target) -> tuple[str, ...]:
    """Return each sparse model with each kind of graph, as `kind/model`; none for a device without
    graphs."""
    return tuple(f"{kind}/{model}" for kind in target.package.graphs for model in SPARSE_MODELS)


def reached(target: Target) -> tuple[str, ...]:
    """Return each sparse model without a graph, as `off/model`, and with each kind of graph unless
    the device shares host memory, as `kind/model`. No case on a device that cannot read cache
    entries in host memory."""
    facts = target.facts()
    if not (facts.reaches_pinned_memory or facts.shares_host_memory):
        return ()
    kinds = () if facts.shares_host_memory else tuple(target.package.graphs)
    return tuple(f"{kind}/{model}" for kind in ("off", *kinds) for model in SPARSE_MODELS)


def by_model(target: Target) -> tuple[str, ...]:
    """Return the names of the kit's models with sparse attention, the same for every device."""
    return tuple(SPARSE_MODELS)


LAWS: tuple[Law, ...] = (
    c2(
        "rows_by_pages",
        "What layers keep as rows of their own does not depend on chunks, neighbours or pages.",
        rows_by_pages,
        sparse.FORGETS_BLOCKS,
        sparse.CHOOSES_FIRST,
        sparse.LOSES_OLDEST,
        sparse.SEES_OPEN_BLOCKS,
        sparse.ROWS_OF_NEIGHBOURS,
        needs=ROWS,
        cases=by_model,
    ),
    c2(
        "slots_and_pages_go_on",
        "Rows that a request left do no harm to the next.",
        slots_and_pages_go_on,
        sparse.READS_BEFORE_THE_FIRST,
        needs=ROWS,
        cases=by_model,
    ),
    c2(
        "hits_of_rows",
        "Cached pages bring along what was kept of them, up to where another request goes on.",
        prefix_hits,
        worker.LOSES_SHARED_PAGES,
        sparse.KEEPS_THE_LAST_PAGE,
        needs=ROWS,
        cases=by_model,
    ),
    c2(
        "retracted_rows",
        "A request that gave its pages up makes its rows again.",
        retraction,
        worker.FORGETS_OUTPUTS,
        needs=ROWS,
        cases=by_model,
    ),
    c2(
        "rows_under_overlap",
        "Plans of rows that are made while another step runs are those of their own step.",
        overlap_is_sequential,
        worker.REUSES_RESULTS,
        needs=ROWS,
        cases=by_model,
    ),
    c2(
        "rows_in_host_memory",
        "What the device keeps a few rows of is what the host has, whoever had the place before.",
        rows_in_host_memory,
        sparse.KEEPS_WHAT_OTHERS_LEFT,
        sparse.FORGETS_TO_LOAD,
        needs=TORCH,
        cases=reached,
    ),
    c2(
        "runners_in_turn",
        "Backends of different rows do not meet in one process.",
        runners_in_turn,
        worker.LATEST_WORKER,
        needs=ROWS,
    ),
    c2(
        "replayed_rows",
        "A replayed step finds its rows as the step itself does.",
        replayed_rows,
        FORGETS_LENGTHS,
        sparse.PLANS_ONCE,
        needs=TORCH | {"graphs"},
        cases=by_graph,
    ),
)
