"""Laws of levels C1 (tiny run) and C2 (runner): whatever the schedule, the results are those of the
reference."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from sglcore.conformance.harness import Harness
from sglcore.conformance.inputs.attention_cases import every_cell
from sglcore.conformance.inputs.kit_models import CONTEXT, SETTINGS
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import LOGPROBS, Law, LawBroken, NotApplicable
from sglcore.conformance.mutant import TORCH
from sglcore.conformance.mutants import mutants_facts as facts
from sglcore.conformance.mutants import mutants_kept as kept
from sglcore.conformance.mutants import mutants_runtime as runtime
from sglcore.conformance.mutants import mutants_worker as worker
from sglcore.conformance.mutants.mutants_attention import FORGETS_LENGTHS
from sglcore.conformance.session import Result
from sglcore.conformance.target import Target
from sglcore.conformance.unreleased import counter

LENGTHS = (1, 5, 30, 17, 9)
BUCKETS = (1, 2, 4, 6)
TOKENS = (16, 32, 64)
"""Token buckets of prompt graphs: few, because each is traced anew."""
INTERPRETED = ((3, 9, 1, 14), (6,))
"""Prompt lengths of the two batches of a replay where each step takes a second: the first fills a
bucket, the second replays one row."""
CHECKED = ("dense", "window", "moe")
KEPT = ("hybrid", "alternating")
"""Models that keep more of a request than KV pages of all tokens: recurrent states, and
sliding-window pages."""
FLAT = 2.0**30
"""A logit bias so large that float32 loses the logit under it: all tokens with this bias are
equally likely."""


def tiny(trial: Trial) -> None:
    """Run one prompt in one step, then four decode steps. Raises LawBroken where log-probabilities
    differ from the reference's. Raises NotApplicable if the device cannot run the case's model."""
    harness = open_case(trial)
    trial.compare(harness, harness.run(random_prompts(1, (7,)), 5, score_prompts=True))


def chunks_are_whole(trial: Trial) -> None:
    """Run prompts in chunks of 1, 5 and 8 tokens, where the worker must continue a prompt from the
    request's state. Raises LawBroken where log-probabilities differ from the reference's. Raises
    NotApplicable if the device cannot run the case's model."""
    harness = open_case(trial)
    for seed, chunk in ((1, 1), (2, 5), (3, 8)):
        trial.compare(harness, harness.run(random_prompts(seed, LENGTHS), 4, chunk=chunk, score_prompts=True))


def batch_is_singles(trial: Trial) -> None:
    """Run each request alone, then all together, and compare both with the reference. Raises
    LawBroken where log-probabilities differ from the reference's. Raises NotApplicable if the
    device cannot run the case's model."""
    harness = open_case(trial)
    prompts = random_prompts(4, LENGTHS)
    trial.compare(harness, [harness.run([prompt], 6)[0] for prompt in prompts])
    trial.compare(harness, harness.run(prompts, 6))


def any_page_layout(trial: Trial) -> None:
    """Run on pages of the size that the case (`page=N`) names, handed out in random order. Raises
    LawBroken where log-probabilities differ from the reference's."""
    with trial.opened("dense", page_size=int(trial.case.removeprefix("page="))) as harness:
        for seed in (4, 5):
            trial.compare(harness, harness.run(random_prompts(seed, LENGTHS), 6, scramble=seed))


def joins_and_leaves(trial: Trial) -> None:
    """Run ten prompts, more than there are slots; they join one by one and end at different steps
    of the run. Raises LawBroken where log-probabilities differ from the reference's. Raises
    NotApplicable if the device cannot run the case's model."""
    harness = open_case(trial)
    for stagger in (1, 3):
        prompts = random_prompts(6, (*LENGTHS, 12, 3, 21, 4, 16))
        trial.compare(harness, harness.run(prompts, (3, 11, 2, 7, 5, 9, 4, 6, 8, 5), stagger=stagger))


def padding_is_inert(trial: Trial) -> None:
    """Run with input buffers that are overwritten before every step. Token 0, which padding rows
    hold, is NaN in the model, and so is page 0 if the kit has access to it. Raises LawBroken where
    log-probabilities differ from the reference's."""
    never_token_0 = {"logit_bias": {0: -FLAT}, "temperature": 0.8, "seed": 5}
    graph, _, model = trial.case.partition("/")
    model = f"spoiled-{model}" if model else "spoiled"
    with trial.opened(model, poison=True, graph=graph, graph_buckets=(4, 6), graph_token_buckets=TOKENS) as harness:
        if "cells" in trial.target.capabilities():
            _spoil_page_zero(harness)
        for lengths in ((1, 5, 9), (4, 2), (7,), (3, 8, 2, 6, 1, 4), (2, 3, 9)):
            trial.compare(harness, harness.run(random_prompts(len(lengths), lengths), 5, sampling=never_token_0))


def _spoil_page_zero(harness: Harness) -> None:
    pool = harness.pool
    cells = every_cell(harness)[: pool.page_size]
    with torch.inference_mode():
        for layer in range(pool.num_layers):
            pool.write_cells(
                layer, cells, *(torch.full_like(part, torch.nan) for part in pool.read_cells(layer, cells))
            )
    harness.settle()


def overlap_is_sequential(trial: Trial) -> None:
    """Sample tokens that pass from step to step on the device only, with the next step planned
    ahead and without. Raises LawBroken where log-probabilities differ from the reference's or, in
    float32, tokens between the two runs; NotApplicable if the worker can not overlap."""
    harness = open_case(trial)
    if not harness.limits.can_overlap:
        raise NotApplicable("this worker takes one step at a time")
    runs = [
        harness.run(random_prompts(3, LENGTHS), 8, overlap=overlap, stagger=2, sampling={"temperature": 0.9, "seed": 7})
        for overlap in (True, False)
    ]
    for results in runs:
        trial.compare(harness, results)
    _check_same_tokens(harness, *runs)


def _check_same_tokens(harness: Harness, first: Sequence[Result], second: Sequence[Result]) -> None:
    """Raise LawBroken unless both runs have the same tokens. In float32 no rounding can change a
    draw; in 16 bits the batch's shape may decide a close one, so nothing is checked."""
    if harness.geometry.dtype != "float32":
        return
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.tokens != other.tokens:
            raise LawBroken(f"request {number} gave {one.tokens}, then {other.tokens}")


def replay_is_eager(trial: Trial) -> None:
    """Run batches that replay every bucket of the graph in the case `kind/model[/dtype]`, large
    after small after large, with prompts in between. Raises LawBroken where log-probabilities
    differ from the reference's, or if a bucket was not replayed."""
    kind, model, *dtype = trial.case.split("/")
    buckets = BUCKETS if model == "dense" else (4,)
    given = {"dtype": dtype[0]} if dtype else {}
    with trial.opened(model, graph=kind, graph_buckets=buckets, graph_token_buckets=TOKENS, **given) as harness:
        batches = ((3, 9, 1, 14, 5, 2), (6,), (8, 4), (11, 2, 7, 3, 1, 5))
        for lengths in INTERPRETED if trial.is_interpreted else batches:
            counts = [3 if trial.is_interpreted else 4 + 2 * place for place in range(len(lengths))]
            trial.compare(harness, harness.run(random_prompts(len(lengths), lengths), counts))
        if not trial.is_interpreted:
            trial.compare(harness, harness.run(random_prompts(9, LENGTHS), 6, stagger=1, chunk=7))
        check_replayed(harness, kind, buckets)


def check_replayed(harness: Harness, kind: str, buckets: Sequence[int]) -> None:
    """Raise LawBroken unless a graph of `kind` ran a step, and one was replayed at each of
    `buckets` (batch sizes); otherwise the results prove nothing."""
    replayed = {path.rpartition(":")[2] for path in harness.recorder.paths if path != "eager"}
    missing = [str(bucket) for bucket in buckets if str(bucket) not in replayed]
    if missing:
        raise LawBroken(f"no step replayed at batch size {', '.join(missing)}; paths: {sorted(harness.recorder.paths)}")
    if not any(path.partition(":")[0] == kind for path in harness.recorder.paths):
        raise LawBroken(f"no step ran as {kind!r}; paths: {sorted(harness.recorder.paths)}")


def sampling_repeats(trial: Trial) -> None:
    """Raise LawBroken unless equal logits give exactly the reference's tokens, and a seed gives the
    same tokens again, whatever else is in the batch (the latter in float32 only); also where
    log-probabilities differ from the reference's.
    """
    harness = trial.kit.harness("dense")
    prompts = random_prompts(7, LENGTHS)
    flat = {"temperature": 0.7, "seed": 11, "logit_bias": dict.fromkeys(range(20, 70), FLAT)}
    rare = {**flat, "top_k": 40, "xtc_probability": 0.5, "xtc_threshold": 0.01}
    reference = trial.kit.reference("dense", harness.geometry.head_dim)
    for stagger, sampling in ((0, flat), (3, flat), (3, rare)):
        wanted = reference.run(prompts, 12, sampling=sampling)
        found = harness.run(prompts, 12, stagger=stagger, sampling=sampling)
        if [result.tokens for result in found] != [result.tokens for result in wanted]:
            raise LawBroken(f"equal logits gave {found[0].tokens}..., wanted {wanted[0].tokens}... of the reference")
    sampling = {"temperature": 1.0, "seed": 3, "top_k": 20, "top_p": 0.9}
    together = harness.run(prompts, 10, sampling=sampling)
    trial.compare(harness, together)
    again = harness.run(prompts[::-1], 10, stagger=2, sampling=sampling)[::-1]
    _check_same_tokens(harness, together, again)


def opens_and_closes(trial: Trial) -> None:
    """Start and close the device ten times. Raises LawBroken if more is held after the last close
    than after the third: bytes on the torch runtime, otherwise objects that bring-ups built."""
    held: list[int] = []
    count = counter(trial.target)
    for _ in range(10):
        with trial.opened("dense") as harness:
            harness.run(random_prompts(2, (5, 9)), 3)
            count.watch(harness.started.built.values())
        del harness
        gc.collect()
        held.append(count.held())
    if held[-1] > held[2]:
        raise LawBroken(f"held {count.what} after each of ten closes: {held}; wanted no growth after the third")


def two_runners(trial: Trial) -> None:
    """Run two models in one process, in alternating steps, with different attention backends if
    there are two. Raises LawBroken where log-probabilities differ from the reference's."""
    backends = tuple(trial.target.usable_attention())
    with trial.opened("dense") as one, trial.opened("window", **_other_backend(trial, backends)) as other:
        run_in_turn(trial, one, other)


def run_in_turn(trial: Trial, *harnesses: Harness) -> None:
    """Run three requests on each device, one step of each device in turn, and compare the results
    with the reference. Raises LawBroken where log-probabilities differ from the reference's."""
    sessions = [harness.session(chunk=6) for harness in harnesses]
    for seed, session in enumerate(sessions):
        session.begin(random_prompts(seed, (9, 4, 17)), 8)
    running = sessions
    while running:
        running = [session for session in running if session.step()]
    for harness, session in zip(harnesses, sessions, strict=True):
        trial.compare(harness, session.end())


def _other_backend(trial: Trial, backends: tuple[str, ...]) -> dict[str, str]:
    """Return a setting (`attention_backend`) with a second backend that takes the sizes of the
    first and serves windows; {} if there is none."""
    if "torch_runtime" not in trial.target.capabilities():
        return {}
    first = trial.target.geometry()
    for name in backends[1:]:
        facts = trial.target.usable_attention()[name].facts
        if trial.target.geometry(name) == first and "sliding_window" in facts.features:
            return {"attention_backend": name}
    return {}


def models(*names: str) -> Callable[[Target], tuple[str, ...]]:
    """Return a function for `Law.cases` that returns the names of these models, and the first of
    them in the dtypes of `Target.other_dtypes`, as `model/dtype`."""
    return lambda target: (*names, *(f"{names[0]}/{dtype}" for dtype in target.other_dtypes()))


def open_case(trial: Trial) -> Harness:
    """Return the shared device of a case named by model, or by model and dtype, as `model[/dtype]`.
    Raises NotApplicable if the device does not compute in a dtype that the model needs, or does not
    keep what the model tests."""
    model, _, dtype = trial.case.partition("/")
    check_computes(trial.target, model)
    harness = trial.kit.harness(model, **({"dtype": dtype} if dtype else {}))
    _check_keeps(harness)
    return harness


def check_computes(target: Target, *models: str) -> None:
    """Raise NotApplicable if one of these models needs a dtype that the device does not compute
    in."""
    for dtype in (SETTINGS[model]["dtype"] for model in models if "dtype" in SETTINGS.get(model, ())):
        if dtype not in target.facts().dtypes:
            raise NotApplicable(
                f"this device does not compute in {dtype}; other roundings change which rows are chosen"
            )


def _check_keeps(harness: Harness) -> None:
    """Raise NotApplicable if the worker does not keep the states or window pages that a model of
    the kit is meant to test."""
    if harness.model == "hybrid" and not harness.limits.keeps_state:
        raise NotApplicable("this worker keeps no states of requests")
    if harness.model == "alternating" and not harness.limits.num_window_pages:
        raise NotApplicable("this worker has no window pages")


def tiny_cases(target: Target) -> tuple[str, ...]:
    """Return the law's cases: each model of CHECKED, and `dense/dtype` in the 16-bit dtypes that
    the facts or the backend prefer."""
    preferred = target.facts().preferred_dtype
    dtypes = dict.fromkeys((*target.other_dtypes(), *((preferred,) if preferred else ())))
    return (*CHECKED, *(f"dense/{dtype}" for dtype in dtypes if dtype != target.geometry().dtype))


def page_cases(target: Target) -> tuple[str, ...]:
    """Return cases `page=N` for the page sizes that the preferred backend takes, up to four of
    them; some of our own if it takes any."""
    classes = tuple(target.usable_attention().values())
    sizes = (classes[0].facts.page_sizes if classes else None) or (1, 3, 8, 16)
    return tuple(f"page={size}" for size in sizes[:4] if size <= CONTEXT)


def padding_cases(target: Target) -> tuple[str, ...]:
    """Return "off" and each kind of graph; also, with recurrent states, "off" and the first kind,
    as `graph/hybrid`."""
    graphs = ("off", *target.package.graphs)
    return (*graphs, *(f"{graph}/hybrid" for graph in graphs[:2]))


def replay_cases(target: Target) -> tuple[str, ...]:
    """Return each kind of graph with each model, as `kind/model[/dtype]`; none for a device without
    graphs."""
    models = (*CHECKED, *KEPT, *(f"dense/{dtype}" for dtype in target.other_dtypes()))
    return tuple(f"{kind}/{model}" for kind in target.package.graphs for model in models)


def c2(name: str, says: str, check: Callable[[Trial], None], *mutants: object, **more: object) -> Law:
    """Return a law of level C2 that compares log-probabilities; `says`, `check` and `mutants` as in
    Law, `more`: other fields of it. Unless `more` says otherwise, it checks the order of work and
    runs no interpreted kernels."""
    given = {"interpreted": frozenset[str](), **more}
    return Law(name=name, level="C2", says=says, check=check, mutants=mutants, tolerance=LOGPROBS, **given)  # pyright: ignore[reportArgumentType]


LAWS: tuple[Law, ...] = (
    Law(
        name="tiny",
        level="C1",
        says="One prefill and four decodes give the reference's log-probabilities.",
        check=tiny,
        mutants=(worker.ONE_POSITION_LATE, worker.FLATTERS),
        tolerance=LOGPROBS,
        cases=tiny_cases,
    ),
    c2(
        "chunks_are_whole",
        "A prompt in chunks of any size gives what it gives whole.",
        chunks_are_whole,
        worker.RESTARTS_CHUNKS,
        kept.LOSES_TAILS,
        cases=models("dense", "window", *KEPT),
    ),
    c2(
        "batch_is_singles",
        "A request gives the same alone and beside others.",
        batch_is_singles,
        worker.ONE_LENGTH_FOR_ALL,
        worker.SWAPS_ROWS,
        cases=models("dense", "moe", "hybrid"),
    ),
    c2(
        "any_page_layout",
        "Neither the size nor the order of pages changes a number.",
        any_page_layout,
        worker.NEIGHBOURING_PAGES,
        cases=page_cases,
    ),
    c2(
        "joins_and_leaves",
        "Requests that join, leave and change rows do not disturb each other.",
        joins_and_leaves,
        worker.KEEPS_ROW_ORDER,
        facts.REFUSES_MIXED,
        kept.KEEPS_OLD_STATES,
        kept.KEEPS_OLD_WINDOWS,
        cases=models("dense", "window", *KEPT),
    ),
    c2(
        "padding_is_inert",
        "Whatever stands in padding rows, in page 0 and in stale buffers changes nothing.",
        padding_is_inert,
        runtime.ROWS_MIX,
        runtime.PADS_NOTHING,
        runtime.STAGES_ONCE,
        kept.PADDING_HAS_A_SLOT,
        cases=padding_cases,
    ),
    c2(
        "overlap_is_sequential",
        "Planning a step while another runs changes nothing.",
        overlap_is_sequential,
        worker.REUSES_RESULTS,
        cases=models("dense", *KEPT),
    ),
    c2(
        "replay_is_eager",
        "A replayed step gives what the step gives, at every bucket, in any order of sizes.",
        replay_is_eager,
        FORGETS_LENGTHS,
        runtime.PADS_NOTHING,
        cases=replay_cases,
        needs=TORCH | {"graphs"},
        interpreted=frozenset({"full/moe"}),
    ),
    c2(
        "sampling_repeats",
        "A seed gives its tokens again, and equal logits give the reference's tokens.",
        sampling_repeats,
        worker.SEEDS_BY_ROW,
        worker.LEAVES_EXCLUSION_OUT,
    ),
    c2(
        "opens_and_closes",
        "Ten opens and closes hold no more memory than a few.",
        opens_and_closes,
        worker.NEVER_CLOSES,
    ),
    c2(
        "two_runners",
        "Two runners with different models and backends in one process do not meet.",
        two_runners,
        worker.LATEST_WORKER,
        runtime.SHARES_POOLS,
    ),
)
