"""Laws of level C2 (runner): requests that return pages, prompts that start from cached pages, and
pages that left a sliding window."""

from __future__ import annotations

import torch

from sglcore.conformance.harness import Harness
from sglcore.conformance.inputs.kit_models import CONTEXT
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import Law, LawBroken, NotApplicable
from sglcore.conformance.laws.laws_runner import KEPT, c2, models, open_case
from sglcore.conformance.mutants import mutants_kept as kept
from sglcore.conformance.mutants import mutants_worker as worker
from sglcore.conformance.session import Result
from sglcore.runtime.memory.pools import TokenToKVPool
from sglcore.schedule.scheduler import Scheduler

OUTPUTS = 16
"""Tokens of a request that is long enough for pages to leave the sliding window."""


def aborts_leak_no_page(trial: Trial) -> None:
    """Abort requests in flight, with overlap and without. Raises LawBroken if a page does not come
    back, or if the results of any request differ from the reference's."""
    harness = trial.kit.harness("dense")
    for overlap in (False, harness.limits.can_overlap):
        session = harness.session(overlap=overlap, stagger=1, after_step=_abort_some)
        results = session.run(random_prompts(5, (9, 12, 3, 20, 7, 15, 2, 11)), 10)
        stats = session.scheduler.stats()
        if stats.free_pages != stats.num_pages:
            raise LawBroken(f"{stats.num_pages - stats.free_pages} pages were not returned: {stats}")
        ended = {result.finish for result in results}
        if ended != {"abort", "length"}:
            raise LawBroken(f"requests ended by {sorted(ended)}, wanted abort and length")
        trial.compare(harness, results)


def _abort_some(scheduler: Scheduler, step: int) -> None:
    for rid in {2: ("r2",), 4: ("r1", "r4"), 6: ("r5",)}.get(step, ()):
        scheduler.abort(rid)


def prefix_hits(trial: Trial) -> None:
    """Run prompts with the prefix of an earlier one, which start on its cached pages and on the
    state snapshots at its branching points. Raises LawBroken if results differ from the
    reference's, or if a request found no cached tokens. Raises NotApplicable if pages are too
    large, or the device cannot run the case's model."""
    harness = open_case(trial)
    length = max(33, 2 * harness.limits.page_size + 1)
    if length + 12 > CONTEXT:
        raise NotApplicable(f"pages of {harness.limits.page_size} tokens are too large for the kit's models")
    session = harness.session(prefix_cache=True, overlap=harness.limits.can_overlap)
    base = random_prompts(8, (length,))[0]
    trial.compare(harness, session.run([base], 4))
    results: list[Result] = []
    for seed in (9, 10):
        tails = random_prompts(seed, (3, 1, 6))
        results = session.run([base, *(base[: length - 4] + tail for tail in tails)], 6)
        trial.compare(harness, results)
    if not all(result.cached for result in results):
        raise LawBroken(f"found cached tokens {[result.cached for result in results]}, wanted some for each request")


def retraction(trial: Trial) -> None:
    """Let pages run out, so that the youngest request is preempted and computed again. Raises
    LawBroken if results differ from the reference's, or if nothing was preempted. Raises
    NotApplicable if pages are too large, or the device cannot run the case's model."""
    harness = open_case(trial)
    size = harness.limits.page_size
    if size > 16:
        raise NotApplicable(f"pages of {size} tokens are too large for the kit's models to run short of them")
    session = harness.session(pages=CONTEXT // size + 2, stagger=1, overlap=harness.limits.can_overlap)
    trial.compare(harness, session.run(random_prompts(10, (20, 24, 28, 22, 25, 30, 26)), 40))
    if not session.scheduler.stats().retractions:
        raise LawBroken("no request was preempted")


class Spoiler:
    """Fills free sliding-window pages with NaN, all at first and then those that become free, so
    that a read of a freed page shows in the result. It is a `Drive.after_step`."""

    def __init__(self, harness: Harness, pool: TokenToKVPool) -> None:
        self._harness, self._pool = harness, pool
        limits, unit = harness.limits, harness.limits.window_unit
        free = range(unit, limits.num_pages + 1, unit) if unit else range(1, limits.num_window_pages + 1)
        self._free = set(free)
        self._spoil(self._free)

    def __call__(self, scheduler: Scheduler, step: int) -> None:
        """Fill with NaN the pages that became free since the last call. The step must have been
        collected."""
        free = set(scheduler.running.memory.windows._pool.free_pages())
        freed, self._free = free - self._free, free
        if freed:
            self._spoil(freed)

    def _spoil(self, pages: set[int]) -> None:
        pool = self._pool
        places = [page * pool.page_size + place for page in sorted(pages) for place in range(pool.page_size)]
        with torch.inference_mode():
            cells = torch.tensor(places, device=self._harness.cell_device)
            for layer in range(pool.num_layers):
                held = pool.read_cells(layer, cells)
                pool.write_cells(layer, cells, *(torch.full_like(part, torch.nan) for part in held))
        self._harness.settle()


def freed_windows_are_free(trial: Trial) -> None:
    """Run requests that outgrow two pages in steps of few tokens, together with others that may get
    the freed window pages. Raises LawBroken if results differ from the reference's, or if no window
    page was freed. Raises NotApplicable if pages are too large, or the device cannot run the case's
    model."""
    harness = open_case(trial)
    size = harness.limits.page_size
    lengths = (size + 2, 30, 3, 2 * size)
    if max(lengths) + OUTPUTS >= CONTEXT:
        raise NotApplicable(f"pages of {size} tokens are too large for the kit's models to fall out of a window")
    is_reached = "torch_runtime" in trial.target.capabilities()
    spoiler = Spoiler(harness, harness.started.built["pools"].windows.token_to_kv) if is_reached else None
    session = harness.session(stagger=2, after_step=spoiler)
    trial.compare(harness, session.run(random_prompts(11, lengths), OUTPUTS))
    if not session.freed_windows:
        raise LawBroken(f"no request of up to {max(lengths) + OUTPUTS} tokens returned a window page")


LAWS: tuple[Law, ...] = (
    c2(
        "aborts_leak_no_page",
        "A request that is aborted gives everything back and harms nobody.",
        aborts_leak_no_page,
        worker.KEEPS_OLD_PAGES,
    ),
    c2(
        "prefix_hits",
        "Cached pages, and snapshots of states, stand in for computing them.",
        prefix_hits,
        worker.LOSES_SHARED_PAGES,
        kept.LATE_SNAPSHOTS,
        cases=models("dense", *KEPT),
    ),
    c2(
        "retraction",
        "A request that gave its pages up goes on as if it had not.",
        retraction,
        worker.FORGETS_OUTPUTS,
        cases=models("dense", *KEPT),
    ),
    c2(
        "freed_windows_are_free",
        "Pages that fell out of every window hold nothing that is still read.",
        freed_windows_are_free,
        kept.SHORT_WINDOW,
        kept.KEEPS_OLD_WINDOWS,
        cases=lambda target: ("alternating",),
    ),
)
