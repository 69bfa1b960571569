"""How an engine starts: configuration, device, bring-up. It knows no device and no tensor
library."""

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
from sglcore.device.bring_up import BringUp
from sglcore.device.choice import ChosenDevice, Requested, check_same
from sglcore.device.discovery import discover
from sglcore.device.errors import BringUpError, ConfigError
from sglcore.device.facts import Facts
from sglcore.device.garbage_collection import no_collection
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.device.package import resolve
from sglcore.device.selection import Choice, select
from sglcore.device.system import host_system
from sglcore.device.topology import Place
from sglcore.device.worker import Limits, ModelWorker
from sglcore.engine.model_download import Hub, commit_of, is_hub_name
from sglcore.engine.speed_trial import keep_faster
from sglcore.sampling.params import SamplingError, SamplingParams

if TYPE_CHECKING:
    from sglcore.engine.ranks.ranks_start import RankOptions

Progress = Callable[[str, int, int], None]
IN_TURN = "this worker takes one step at a time"


@dataclass(frozen=True, slots=True)
class Started:
    """A running worker, and how it was started."""

    worker: ModelWorker
    """The worker."""
    ledger: DecisionLedger
    """The decisions."""
    choice: Choice
    """The chosen device."""
    facts: Facts
    """The device's facts."""
    model_path: Path
    """The checkpoint folder, or the GGUF file."""
    seconds: Mapping[str, float]
    """Seconds of each bring-up step, by its name."""
    overlap: bool
    """Steps are submitted before the previous one was collected."""
    check: Callable[[], None] = lambda: None
    """Raises WorkerLost if the worker can take no more steps. It does not wait."""


def no_progress(phase: str, done: int, total: int) -> None:
    """Show nothing."""


def embedded_model() -> Path:
    """The folder of the model that ships with the package."""
    return Path(str(files("sglcore") / "assets" / "demo"))


def is_model(path: Path) -> bool:
    """Return whether a path is a checkpoint folder or a GGUF file."""
    return (path / "config.json").is_file() or is_gguf(path)


def model_folder(config: EngineConfig, progress: Progress = no_progress) -> Path:
    """Return the checkpoint folder, or GGUF file, that the configuration names. A name of the hub
    is downloaded unless it is in the cache, which waits. Raises ConfigError if there is none."""
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
    """Return the configuration and its model folder, which exists. A model of the hub is pinned to
    the commit, so that all processes with the configuration use the same files. Waits. Raises
    ConfigError."""
    folder = model_folder(config, progress)
    is_named = config.model is not None and is_hub_name(config.model)
    return (replace(config, revision=commit_of(folder)) if is_named else config), folder


def has_draft(folder: Path) -> bool:
    """Return whether a model's folder contains a folder of a draft model."""
    return (folder / DRAFT_FOLDER / "config.json").is_file()


def _with_draft(config: EngineConfig, progress: Progress) -> EngineConfig:
    """Return the configuration after downloading a draft model that it names on the hub."""
    if config.draft_model is None or not is_hub_name(config.draft_model):
        return config
    return replace(config, draft_model=str(Hub(progress, token=config.hf_token).fetch(config.draft_model)))


def choose(config: EngineConfig, ledger: DecisionLedger) -> Choice:
    """Discover and select the device; the decision goes to the ledger."""
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
    """Choose the device, which must equal the `parent` process's, and run its bring-up. Waits until
    the worker is ready.

    If several ranks hold the model, each does this in a process of its own, which `ranks` starts
    (None: on this machine). Raises SglcoreError for errors that a user can correct; other errors of
    a package keep their traceback.
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
    """Return the facts of the chosen device."""
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
    """Run the package's bring-up; returns what it built, and the seconds of each step. Waits.
    `place`: the place of one of several ranks. With `last`, stop after the step of that name."""
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
    """Return whether to plan the next step while one is in flight, and the decision: yes if that
    saves time, unless the configuration says otherwise."""
    requested = "auto" if config.overlap is None else _switch(config.overlap)
    if config.overlap is not False and not limits.can_overlap:
        return False, Row("overlap", requested, "off", IN_TURN, downgrade=config.overlap is True)
    if config.overlap is not None:
        return config.overlap, Row("overlap", requested, requested, "requested", "SGLCORE_OVERLAP=0 or 1")
    if limits.runs_ahead:
        return True, Row("overlap", requested, "on", "steps are planned while the device runs", "SGLCORE_OVERLAP=0")
    reason = "a step has completed when `submit` returns, so planning ahead gains nothing"
    return False, Row("overlap", requested, "off", reason, "SGLCORE_OVERLAP=1")


def choose_prefix_cache(config: EngineConfig, limits: Limits) -> Row:
    """Return the decision whether prompts share prefixes; with recurrent states, only if there is
    room for snapshots."""
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
    """Return the sampling parameters, by name, for requests that set none: the checkpoint's, unless
    that is off. Raises ConfigError."""
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
