"""Puts schedulers and their loops together, with the optional features that a worker's limits
have.
"""

from __future__ import annotations

from functools import partial

from sglcore.schedule.batch_builder import Compose
from sglcore.schedule.data_parallel.dp_loop import ShardLoop
from sglcore.schedule.data_parallel.dp_ranks import Shards
from sglcore.schedule.layered_prefill.slice_choice import Slicing
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop
from sglcore.worker.model_worker import Limits, ModelWorker


def make_scheduler(
    limits: Limits, *, prefix_cache: bool = True, compose: Compose | None = None, first_composition: int = 0
) -> Scheduler:
    """Return the scheduler of a worker with these limits. It runs prompts in slices of layers if
    the limits have `sliced_layers`. `compose` makes the sampling state of a batch from its requests
    (None: SamplingRows); compositions are counted from `first_composition`. Raises ConfigError for
    limits that cannot hold one request of full length or exclude each other."""
    return Scheduler(
        limits,
        prefix_cache=prefix_cache,
        compose=compose,
        first_composition=first_composition,
        prefill=Slicing(limits) if limits.sliced_layers else None,
    )


def make_loop(
    worker: ModelWorker, shards: int = 1, *, overlap: bool = True, prefix_cache: bool = True
) -> tuple[Scheduler, Loop] | tuple[Shards, ShardLoop]:
    """Make the scheduler of a worker's requests and its loop, and return both: a `Scheduler` and a
    `Loop`, or with several `shards` a `Shards` of one scheduler each and a `ShardLoop`. Each shard
    has the worker's full limits. `overlap` has no effect if the limits do not allow it."""
    if shards == 1:
        scheduler = make_scheduler(worker.limits, prefix_cache=prefix_cache)
        return scheduler, Loop(scheduler, worker, overlap=overlap)
    schedulers = Shards(worker.limits, shards, make=partial(make_scheduler, prefix_cache=prefix_cache))
    return schedulers, ShardLoop(schedulers, worker, overlap=overlap)
