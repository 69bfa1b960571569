"""The bring-up step for `--speculative auto`: a worker without speculation over the same weights
and KV cache, to measure which one is faster."""

from __future__ import annotations

import numpy as np

from sglcore.device.package import DevicePackage, resolve
from sglcore.step.sizing import MemorySizes
from sglcore.worker.model_worker import Trial
from sglcore_mlx.attention.contract import DecodeAttention
from sglcore_mlx.models.contract import Model
from sglcore_mlx.pool import DeviceState
from sglcore_mlx.residency import Residency
from sglcore_mlx.speculative.choice import Speculation, without_speculation
from sglcore_mlx.stepper import Stepper, StepperOptions
from sglcore_mlx.thread import StreamThread
from sglcore_mlx.worker import MlxWorker


def trial(
    stream_thread: StreamThread,
    package: DevicePackage,
    model: Model,
    sizes: MemorySizes,
    pools: DeviceState,
    attention: DecodeAttention,
    options: StepperOptions,
    residency: Residency,
    speculation: Speculation | None,
    worker: MlxWorker,
) -> Trial | None:
    """Return the worker with speculation, and one without; None if there is no trial."""
    if speculation is None or not speculation.is_tried:
        return None

    def make() -> Stepper:
        return Stepper(model, attention, pools, sizes, **options)

    def leave() -> None:
        pools.drafts = pools.history = None
        pools.draft_cells, pools.moved = [], []

    limits = without_speculation(worker.limits)
    given = stream_thread.call(make), stream_thread.share(), limits, residency.close
    plain: MlxWorker = resolve(package.worker, package.name)(*given)
    first = model.config.words.get("bos_token_id")
    prompt = np.array([first if isinstance(first, int) else 0], dtype=np.int32)
    summary = f"{speculation.summary}; {speculation.promise}"
    return Trial(summary, worker, plain, prompt, lambda: stream_thread.call(leave))
