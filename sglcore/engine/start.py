"""How an engine starts: configuration, device, bring-up. It contains nothing about a particular
device or tensor library."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglcore.checkpoint.checkpoint_files import DRAFT_FOLDER
from sglcore.checkpoint.generation_config import GENERATION, read_sampling
from sglcore.checkpoint.gguf_header import is_gguf
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import BringUpError, ConfigError
from sglcore.core.garbage_collection import no_collection
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.bring_up import BringUp
from sglcore.device.choice import ChosenDevice, Requested, check_same
from sglcore.device.discovery import discover
from sglcore.device.facts import Facts
from sglcore.device.package import resolve
from sglcore.device.selection import Choice, select
from sglcore.device.system import host_system
from sglcore.engine.model_download import Hub, commit_of, is_hub_name
from sglcore.engine.speed_trial import keep_faster
from sglcore.sampling.params import SamplingError, SamplingParams
from sglcore.worker.model_worker import Limits, ModelWorker
from sglcore.worker.topology import Place

if TYPE_CHECKING:
    from sglcore.engine.ranks.ranks_start import RankOptions

Progress = Callable[[str, int, int], None]
IN_TURN = "this worker takes one step at a time"


@dataclass(frozen=True, slots=True)
class Started:
    """A running worker and how it was started, as `start` returns it: the decisions in the ledger,
    the chosen device with its facts, the checkpoint, and the seconds of each step. The caller must
    close the worker."""

    worker: ModelWorker
    """The worker that runs the model's steps; its owner must close it."""
    ledger: DecisionLedger
    """The start-up decisions."""
    choice: Choice
    """The chosen device."""
    facts: Facts
    """The device's facts."""
    model_path: Path
    """The checkpoint folder, or the GGUF file."""
    seconds: Mapping[str, float]
    """Seconds of each bring-up step, by its name, and their "total"."""
    overlap: bool
    """Whether a step is planned and submitted before the step before it is collected."""
    check: Callable[[], None] = lambda: None
    """Raises WorkerLost if the worker can run no more steps. Does not wait."""


def no_progress(phase: str, done: int, total: int) -> None:
    """Ignore the progress: the default callback."""


def embedded_model() -> Path:
    """Return the folder of the model that ships with the package."""
    return Path(str(files("sglcore") / "assets" / "demo"))


def is_model(path: Path) -> bool:
    """Return whether a path is a checkpoint folder, which has a config.json, or a GGUF file."""
    return (path / "config.json").is_file() or is_gguf(path)


def model_folder(config: EngineConfig, progress: Progress = no_progress) -> Path:
    """Return the checkpoint folder, or GGUF file, that the configuration names (no name: the
    embedded model). A name of the Hugging Face hub is downloaded unless it is in the cache, which
    waits. Raises ConfigError if there is no such model; the content of a local folder is not
    checked."""
    if config.model is None:
        return embedded_model()
    if is_hub_name(config.model):
        return Hub(progress, config.revision, config.hf_token, config.trust_remote_code).fetch(config.model)
    folder = Path(config.model).expanduser()
    if not folder.is_dir() and not is_gguf(folder):
        raise ConfigError(
            f"there is no model at {str(folder)!r}",
            wanted="a checkpoint folder with config.json, a .gguf file, or a name of the hub such as Qwen/Qwen3-0.6B",
            remedy="check the path, or leave the model out to use the embedded one",
        )
    return folder


def fetched(config: EngineConfig, progress: Progress) -> tuple[EngineConfig, Path]:
    """Return the configuration and its checkpoint folder or GGUF file, downloaded if necessary. For
    a model of the hub, `revision` becomes the commit, so that all processes with the configuration
    use the same files. Waits. Raises ConfigError."""
    folder = model_folder(config, progress)
    is_named = config.model is not None and is_hub_name(config.model)
    return (replace(config, revision=commit_of(folder)) if is_named else config), folder


def has_draft(folder: Path) -> bool:
    """Return whether a checkpoint folder contains a draft model in the folder DRAFT_FOLDER."""
    return (folder / DRAFT_FOLDER / "config.json").is_file()


def _with_draft(config: EngineConfig, progress: Progress) -> EngineConfig:
    """Return the configuration; a draft model that it names on the hub is downloaded and replaced
    by its folder. Waits. Raises ConfigError if it cannot be fetched."""
    if config.draft_model is None or not is_hub_name(config.draft_model):
        return config
    return replace(config, draft_model=str(Hub(progress, token=config.hf_token).fetch(config.draft_model)))


def choose(config: EngineConfig, ledger: DecisionLedger) -> Choice:
    """Find the devices of this machine, select one as the configuration says, and record the
    decision in the ledger.

    Raises DeviceError if none can be selected.
    """
    source = config.sources.get("device", "argument")
    source = "--device" if source == "argument" else source
    requested = Requested.parse(config.device, source) if config.device else Requested()
    choice = select(discover(), requested, system=host_system(root=config.system_root))
    ledger.record(*choice.rows)
    return choice


@no_collection()
def start(
    config: EngineConfig,
    progress: Progress = no_progress,
    parent: ChosenDevice | None = None,
    ranks: RankOptions | None = None,
) -> Started:
    """Choose the device and run its bring-up. Waits until the worker is ready. `parent`: the device
    that the parent process chose; another choice is an error.

    With `tp`, `dp` or `ep` above 1, processes of ranks are started instead, as `ranks` says (None:
    its defaults). Raises SglcoreError for errors that a user can correct; other errors of a package
    keep their traceback.
    """
    ledger = DecisionLedger(strict=config.strict)
    folder = model_folder(config, progress)
    config = _with_draft(config, progress)
    choice = choose(config, ledger)
    if parent is not None:
        check_same(choice.chosen, parent)
    ledger.record(_model_row(config, folder))
    _, sampling = choose_sampling(config, folder)
    begin, check = time.perf_counter(), None
    if max(config.tp, config.dp, config.ep) > 1:
        from sglcore.engine.ranks.ranks_start import start_ranks

        worker, seconds = start_ranks(config, folder, choice, ledger, progress, ranks)
        check, trial = worker.check, None
    else:
        built, seconds = bring_up(config, folder, choice, ledger, progress)
        worker, trial = built["worker"], built.get("trial")
    seconds = {**seconds, "total": time.perf_counter() - begin}
    try:
        if trial is not None:
            worker = keep_faster(trial, ledger)
        overlap, row = choose_overlap(config, worker.limits)
        ledger.record(row, choose_prefix_cache(config, worker.limits))
        if worker.limits.generates:
            ledger.record(sampling)
    except BaseException:
        worker.close()
        raise
    started = Started(worker, ledger, choice, facts_of(choice), folder, seconds, overlap)
    return started if check is None else replace(started, check=check)


def facts_of(choice: Choice) -> Facts:
    """Return the facts of the chosen device, as its package declares them."""
    return resolve(choice.package.facts, choice.package.name)(choice.chosen.index)


def bring_up(
    config: EngineConfig,
    folder: Path,
    choice: Choice,
    ledger: DecisionLedger,
    progress: Progress,
    place: Place | None = None,
    last: str | None = None,
) -> tuple[Mapping[str, Any], dict[str, float]]:
    """Run the bring-up of the chosen package; returns what its steps made, by name, and the seconds
    of each step. Waits. `folder`: the checkpoint; `place`: this process's place among ranks (None:
    it is the only one); `last`: the name of the step to stop after (None: run all). Raises
    BringUpError for an order that cannot run and for an unknown `last`, and what a step raises."""
    package = choice.package
    order: BringUp = resolve(package.bring_up, package.name)
    if last is not None:
        names = [step.provides for step in order.steps]
        if last not in names:
            raise BringUpError(f"device {package.name!r} has no step {last!r}", wanted=f"one of {', '.join(names)}")
        order = BringUp(order.steps[: names.index(last) + 1])
    seconds: dict[str, float] = {}
    given: dict[str, Any] = {
        "config": config,
        "package": package,
        "facts": facts_of(choice),
        "ledger": ledger,
        "progress": progress,
        "model_path": folder,
    }
    built = order.run(given if place is None else {**given, "place": place}, report=seconds.__setitem__)
    return built, seconds


def choose_overlap(config: EngineConfig, limits: Limits) -> tuple[bool, Row]:
    """Return whether to plan the next step while one is in flight, and the ledger's row: as
    configured if the worker can; by default only if the worker runs ahead of the host."""
    requested = "auto" if config.overlap is None else _switch(config.overlap)
    if config.overlap is not False and not limits.can_overlap:
        why = limits.against_overlap or IN_TURN
        return False, Row("overlap", requested, "off", why, downgrade=config.overlap is True)
    if config.overlap is not None:
        return config.overlap, Row("overlap", requested, requested, "requested", "SGLCORE_OVERLAP=0 or 1")
    if limits.runs_ahead:
        return True, Row("overlap", requested, "on", "steps are planned while the device runs", "SGLCORE_OVERLAP=0")
    reason = "a step has completed when `submit` returns, so planning ahead gains nothing"
    return False, Row("overlap", requested, "off", reason, "SGLCORE_OVERLAP=1")


def choose_prefix_cache(config: EngineConfig, limits: Limits) -> Row:
    """Return the ledger's row about the prefix cache: on if configured, but for a model with
    recurrent states only if there is room for snapshots."""
    requested = _switch(config.prefix_cache) if "prefix_cache" in config.sources else "auto"
    if not config.prefix_cache:
        return Row("prefix cache", requested, "off", "every prompt is computed", "SGLCORE_PREFIX_CACHE=1")
    reason = "prompts share the pages of their common prefix"
    if limits.keeps_state and not limits.num_snapshots:
        reason = "the model keeps a state for each request, and no snapshot of one fits"
        return Row(
            "prefix cache",
            requested,
            "off",
            reason,
            "raise snapshot_memory or kv_cache_memory",
            downgrade=requested == "on",
        )
    if limits.keeps_state:
        reason += f", up to a position for which one of {limits.num_snapshots} snapshots has the state"
    return Row("prefix cache", requested, "on", reason, "SGLCORE_PREFIX_CACHE=0")


def choose_sampling(config: EngineConfig, folder: Path) -> tuple[Mapping[str, float], Row]:
    """Return the sampling parameters, by name, for requests that do not set them, and the ledger's
    row: those of the checkpoint's generation_config.json, none with `generation_config` "none".
    Raises ConfigError if the file has invalid values."""
    requested = config.generation_config
    if requested == "none":
        return {}, Row("sampling", requested, "as requests say", "requested")
    found = read_sampling(folder)
    try:
        SamplingParams(**found)  # pyright: ignore[reportArgumentType]
    except SamplingError as error:
        raise ConfigError(f"{folder / GENERATION}: {error}", remedy="--generation-config none") from None
    if not found:
        return {}, Row("sampling", requested, "as requests say", f"no {GENERATION} says otherwise")
    values = ", ".join(f"{name} {value:g}" for name, value in found.items())
    reason = f"{GENERATION}, for requests that name none"
    return found, Row("sampling", requested, values, reason, "--generation-config none")


def _switch(on: bool) -> str:
    return "on" if on else "off"


def _model_row(config: EngineConfig, folder: Path) -> Row:
    if config.model is None:
        return Row(
            "model", "none named", "embedded", "a small model ships with the package", "name a checkpoint folder"
        )
    return Row("model", config.model, str(folder), "requested")
