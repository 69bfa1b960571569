"""Laws of level C4 (serving), text through the engine: streamed pieces, concurrent requests,
refused and aborted requests, statistics. No law covers the HTTP server; `tests/serving` tests
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from sglcore.conformance.harness import Harness
from sglcore.conformance.inputs.kit_models import CONTEXT, KV_HEADS, LAYERS
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import LOGPROBS, Law, LawBroken
from sglcore.conformance.mutants import mutants_worker as worker
from sglcore.core.errors import SglcoreError
from sglcore.engine.core import Engine, Prompt
from sglcore.engine.outputs import Completion, RequestOutput
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import TokenLogprob

PROMPTS = ("Once upon a time", "The river was wide, and", "A", "Nobody knew why the old clock", "Seven birds sat")
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


def make_engine(trial: Trial, harness: Harness) -> Engine:
    """Return an engine with a new scheduler over a shared device. The caller must not close it,
    because that would close the shared device."""
    harness.recorder.next_scheduler()
    folder = trial.kit.checkpoint("text", harness.geometry.head_dim)
    return Engine(harness.recorder, folder, overlap=harness.limits.can_overlap)


def generate(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams = PARAMS) -> list[RequestOutput]:
    """Complete prompts together and return their outputs, in order. Waits."""
    outputs = [engine.add(prompt, params) for prompt in prompts]
    while not all(output.finished for output in outputs):
        engine.step()
    return outputs


def text_streams(trial: Trial) -> None:
    """Stream completions of some prompts. Raises LawBroken unless joined pieces are the text of the
    output, all tokens are there, and tokens and log-probabilities are the reference's."""
    harness = trial.kit.harness("text")
    engine = make_engine(trial, harness)
    reference = make_engine(trial, trial.kit.reference("text", harness.geometry.head_dim))
    wanted = generate(reference, PROMPTS)
    outputs, texts = [engine.add(prompt, PARAMS) for prompt in PROMPTS], {}
    while not all(output.finished for output in outputs):
        for piece in engine.step():
            texts[piece.request_id] = texts.get(piece.request_id, "") + piece.text
    for output, other in zip(outputs, wanted, strict=True):
        found = output.outputs[0]
        if texts[output.request_id] != found.text:
            raise LawBroken(f"the pieces give {texts[output.request_id]!r}, the text is {found.text!r}")
        if not found.text or len(found.token_ids) != PARAMS.max_tokens:
            raise LawBroken(f"{len(found.token_ids)} tokens, {found.text!r}, ended by {found.finish_reason}")
        compare_completions(trial, harness, found, other.outputs[0])


def compare_completions(trial: Trial, harness: Harness, found: Completion, wanted: Completion) -> None:
    """Raise LawBroken unless two completions have equal tokens with log-probabilities that differ
    by at most the tolerance. Nothing is compared after a position where different tokens are within
    twice the tolerance on both sides."""
    dtype = harness.geometry.dtype
    bound = trial.tolerance(dtype)
    assert found.logprobs is not None and wanted.logprobs is not None
    if len(found.logprobs) != len(wanted.logprobs):
        raise LawBroken(f"{len(found.logprobs)} tokens, wanted {len(wanted.logprobs)}")
    for place, (one, other) in enumerate(zip(found.logprobs, wanted.logprobs, strict=True)):
        error = abs(one.logprob - other.logprob)
        if one.token_id != other.token_id and _nearly_equal(one, other, 2 * bound):
            return
        trial.note(error, dtype)
        if one.token_id != other.token_id or not error <= bound:
            raise LawBroken(
                f"token {place} is {one.token_id} ({one.logprob:.5f}), wanted {other.token_id} ({other.logprob:.5f})"
            )


def _nearly_equal(one: TokenLogprob, other: TokenLogprob, bound: float) -> bool:
    """Return whether each side lists the other's token among its best, with a log-probability
    within `bound` of that of its own token."""
    pairs = ((one, other.token_id), (other, one.token_id))
    return all(abs(dict(mine.top).get(token, -1e9) - mine.logprob) <= bound for mine, token in pairs)


def concurrent_is_serial(trial: Trial) -> None:
    """Run requests one after another, then all at once. Raises LawBroken where their completions
    differ (`compare_completions`)."""
    harness = trial.kit.harness("text")
    engine = make_engine(trial, harness)
    serial = [generate(engine, [prompt])[0] for prompt in PROMPTS]
    for one, other in zip(generate(engine, PROMPTS), serial, strict=True):
        compare_completions(trial, harness, one.outputs[0], other.outputs[0])


def bad_requests_hurt_nobody(trial: Trial) -> None:
    """Send prompts that must be refused, and abort a request in mid-flight. Raises LawBroken if one
    is accepted, if the aborted request ends otherwise, or if the completions of other requests
    change."""
    harness = trial.kit.harness("text")
    engine = make_engine(trial, harness)
    serial = [generate(engine, [prompt])[0] for prompt in PROMPTS]
    outputs = [engine.add(prompt, PARAMS) for prompt in PROMPTS[:3]]
    gone = engine.add("The end of this one comes early", PARAMS)
    for prompt in ("", [], [engine.vocab_size], [-1], [5] * (harness.limits.max_model_len + 1), ["text"]):
        _refused(engine, prompt)  # pyright: ignore[reportArgumentType]
    for _ in range(3):
        engine.step()
    engine.abort(gone.request_id)
    outputs += [engine.add(prompt, PARAMS) for prompt in PROMPTS[3:]]
    while engine.has_work:
        engine.step()
    if gone.outputs[0].finish_reason != "abort":
        raise LawBroken(f"the aborted request ended by {gone.outputs[0].finish_reason}")
    for one, other in zip(outputs, serial, strict=True):
        compare_completions(trial, harness, one.outputs[0], other.outputs[0])


def _refused(engine: Engine, prompt: Prompt) -> None:
    if prompt == "" and engine.codec.encode(""):
        return  # This tokenizer puts something before every text, so an empty one can run.
    try:
        engine.add(prompt, PARAMS)
    except (SglcoreError, ValueError):
        return
    raise LawBroken(f"the prompt {prompt!r:.60} was accepted, wanted an error")


def stats_are_true(trial: Trial) -> None:
    """Raise LawBroken unless, after some work, the counts are those of an idle engine, the pages
    add up, and the device really has the memory that its limits promise."""
    harness = trial.kit.harness("text")
    engine = make_engine(trial, harness)
    generate(engine, PROMPTS)
    while engine.has_work:
        engine.step()
    stats = engine.scheduler.stats()
    busy = {
        name: getattr(stats, name) for name in ("waiting", "running", "decoding", "in_flight") if getattr(stats, name)
    }
    if busy:
        raise LawBroken(f"the engine is not idle after the last request: {busy}")
    if stats.free_pages + stats.cached_pages != stats.num_pages:
        raise LawBroken(f"pages do not add up: {stats}")
    if "torch_runtime" in trial.target.capabilities():
        _check_cells(harness)
    _check_promise(trial, harness.limits.page_size)


def _check_cells(harness: Harness) -> None:
    """Raise LawBroken if the pool has fewer KV slots than the limits promise."""
    cells = harness.started.built["pools"].token_to_kv.num_cells
    if harness.limits.capacity > cells - harness.limits.page_size:
        raise LawBroken(f"the limits promise {harness.limits.capacity} tokens, the pool has {cells} KV slots")


def _check_promise(trial: Trial, page_size: int) -> None:
    """Start the device with memory for a few pages of this size; raise LawBroken if its limits
    promise more."""
    geometry = trial.target.geometry()
    cell = LAYERS * 2 * KV_HEADS * geometry.head_dim * DTYPE_BYTES[geometry.dtype]
    pages = CONTEXT // page_size + 2
    with trial.opened("text", page_size=page_size, kv_cache_memory=pages * page_size * cell) as harness:
        if harness.limits.num_pages > pages:
            raise LawBroken(
                f"memory for {pages} pages of {page_size}, but the limits promise {harness.limits.num_pages}"
            )


def _c4(name: str, says: str, check: Callable[[Trial], None], *mutants: object) -> Law:
    given = {} if name == "text_streams" else {"interpreted": frozenset[str]()}
    return Law(name=name, level="C4", says=says, check=check, mutants=mutants, tolerance=LOGPROBS, **given)  # pyright: ignore[reportArgumentType]


LAWS: tuple[Law, ...] = (
    _c4(
        "text_streams",
        "Streamed pieces make the text of the reference's tokens.",
        text_streams,
        worker.ONE_POSITION_LATE,
        worker.SWAPS_ROWS,
    ),
    _c4(
        "concurrent_is_serial",
        "A request's text is the same alone and among others.",
        concurrent_is_serial,
        worker.SWAPS_ROWS,
        worker.ONE_LENGTH_FOR_ALL,
    ),
    _c4(
        "bad_requests_hurt_nobody",
        "Refused and aborted requests change no other.",
        bad_requests_hurt_nobody,
        worker.KEEPS_OLD_PAGES,
    ),
    _c4("stats_are_true", "Counts and limits say what is.", stats_are_true, worker.OVERSTATES),
)
