"""Steps of the bring-up that make the worker, with its steppers and limits."""

from __future__ import annotations

from sglcore.config.engine_config import EngineConfig
from sglcore.device.package import DevicePackage, resolve
from sglcore.step.sizing import MemorySizes
from sglcore.worker.model_worker import Limits
from sglcore_mlx.attention.blocks import has_blocks
from sglcore_mlx.attention.contract import DecodeAttention
from sglcore_mlx.models.contract import Model
from sglcore_mlx.parallel.ranks import Ranks
from sglcore_mlx.parallel.worker import RankWorker
from sglcore_mlx.pool import DeviceState
from sglcore_mlx.residency import Residency
from sglcore_mlx.speculative.choice import COUPLED, Speculation
from sglcore_mlx.speculative.draft_stepper import DraftStepper
from sglcore_mlx.speculative.drafter import DraftParts
from sglcore_mlx.speculative.drafter_kinds import drafter_type, lookahead_of
from sglcore_mlx.speculative.drafts import Draft
from sglcore_mlx.speculative.rejection import DraftRejectionStepper, RejectionStepper
from sglcore_mlx.speculative.stepper import SpeculativeStepper
from sglcore_mlx.speculative.tree_stepper import TreeStepper
from sglcore_mlx.speculative.worker import SpeculativeWorker
from sglcore_mlx.stepper import Stepper, StepperOptions
from sglcore_mlx.thread import StreamThread
from sglcore_mlx.worker import MlxWorker


def worker(
    stream_thread: StreamThread,
    config: EngineConfig,
    package: DevicePackage,
    model: Model,
    sizes: MemorySizes,
    pools: DeviceState,
    attention: DecodeAttention,
    options: StepperOptions,
    residency: Residency,
    slices: int | None,
    speculation: Speculation | None,
    draft: Draft | None,
    draft_attention: DecodeAttention | None,
    ranks: Ranks | None,
) -> MlxWorker:
    """Make the worker that the scheduler submits to, with its limits. With speculation it is a
    `SpeculativeWorker`, for one of several ranks a `RankWorker`, otherwise the class that the
    package names."""
    limits = Limits(
        max_model_len=sizes.max_model_len,
        max_requests=sizes.max_requests,
        page_size=sizes.page_size,
        num_pages=sizes.num_pages,
        max_batch_tokens=config.max_batch_tokens,
        vocab_size=model.config.vocab_size,
        runs_ahead=True,
        generates=not model.config.is_encoder,
        takes_masks=True,
        takes_changes=True,
        keeps_state=bool(model.states) and not has_blocks(model.layers),
        num_snapshots=sizes.num_snapshots,
        **sizes.num_bytes,
        num_labels=0 if model.config.pooling is None else model.config.pooling.labels,
        hidden_size=0 if model.config.is_encoder else model.config.hidden_size,
        gives_norm_inputs=not (model.config.is_encoder or model.against_norm_inputs),
        sliced_layers=0 if slices is None else model.sliced_layers,
        slice_budget=slices or 0,
    )
    if speculation is not None:
        limits = speculation.limits_of(limits, lookahead_of(draft))

    def make() -> Stepper:
        parts = (model if draft is None else draft.target, attention, pools, sizes)
        if speculation is None:
            return Stepper(*parts, **options)
        ruled = {} if speculation.rule == COUPLED else {"rule": speculation.rule}
        own = {"tokens": speculation.tokens, **ruled, **options}
        if draft is None or draft_attention is None:
            return (RejectionStepper if ruled else SpeculativeStepper)(*parts, **own)
        given = DraftParts(draft, draft_attention, sizes.page_size, options["compiles"])
        own["model_drafter"] = drafter_type(draft)(given)
        if speculation.tree is not None:
            return TreeStepper(*parts, shape=speculation.tree, **own)
        return (DraftRejectionStepper if ruled else DraftStepper)(*parts, **own)

    given = stream_thread.call(make), stream_thread, limits, residency.close
    if speculation is not None:
        return SpeculativeWorker(*given, lengths=speculation.lengths)
    if ranks is not None:
        return RankWorker(*given)
    return resolve(package.worker, package.name)(*given)
