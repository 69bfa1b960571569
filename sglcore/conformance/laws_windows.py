"""C2: pages of their own for windows: what fell out of one is free at once, and nobody reads it again."""

from __future__ import annotations

import torch

from sglcore.conformance import mutants_kept as kept
from sglcore.conformance.checkpoint import CONTEXT
from sglcore.conformance.harness import Harness, random_prompts
from sglcore.conformance.law import LOGPROBS, Law, LawBroken, NotApplicable
from sglcore.conformance.laws_runner import check_keeps
from sglcore.conformance.trial import Trial
from sglcore.runtime.memory.pools import TokenToKVPool
from sglcore.schedule.scheduler import Scheduler

OUTPUTS = 16


class Spoiler:
    """Window pages that are nobody's hold no number, so whoever needs one after all is seen."""

    def __init__(self, harness: Harness, pool: TokenToKVPool) -> None:
        self._harness, self._pool = harness, pool
        self._free = set(range(1, harness.limits.num_window_pages + 1))
        self._spoil(self._free)

    def __call__(self, scheduler: Scheduler, step: int) -> None:
        """After a step that was collected."""
        free = set(scheduler._running.memory.windows._pool.free_pages())
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
    """Requests that outgrow a page and their window, step by step of a few tokens, beside others that may get the page."""
    harness = trial.kit.harness("alternating")
    check_keeps(harness)
    size = harness.limits.page_size
    longest = CONTEXT - OUTPUTS
    if size + harness.limits.window > longest:
        raise NotApplicable(f"pages of {size} tokens are too large for the kit's models to fall out of a window")
    is_reached = "torch_runtime" in trial.target.capabilities()
    spoiler = Spoiler(harness, harness.started.built["pools"].windows.token_to_kv) if is_reached else None
    session = harness.session(stagger=2, after_step=spoiler)
    trial.compare(harness, session.run(random_prompts(11, (size + 2, 30, 3, min(longest, 2 * size))), OUTPUTS))
    if not session.freed_windows:
        raise LawBroken(f"no request of up to {min(longest, 2 * size) + OUTPUTS} tokens gave a window page back")


LAWS: tuple[Law, ...] = (
    Law(
        name="freed_windows_are_free",
        level="C2",
        says="Pages that fell out of every window hold nothing that is still read.",
        check=freed_windows_are_free,
        mutants=(kept.SHORT_WINDOW, kept.KEEPS_OLD_WINDOWS),
        tolerance=LOGPROBS,
        interpreted=frozenset(),
    ),
)
