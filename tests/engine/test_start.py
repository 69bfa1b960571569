"""The decisions of a start apart from its device: overlap and the prefix cache."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from sglcore.config.engine_config import EngineConfig, resolve_config
from sglcore.core.errors import BringUpError, ConfigError, DeviceError
from sglcore.core.ledger import DecisionLedger
from sglcore.device.package import resolve
from sglcore.engine import start as start_module
from sglcore.engine.llm import LLM
from sglcore.engine.start import (
    IN_TURN,
    _with_draft,
    bring_up,
    choose,
    choose_overlap,
    choose_prefix_cache,
    choose_sampling,
    embedded_model,
    fetched,
    has_draft,
    is_model,
    model_folder,
    no_progress,
    start,
)
from sglcore.sampling.params import SamplingParams
from sglcore.worker.model_worker import Limits

LIMITS = Limits(64, 4, 4, 64, 64, 100)


@pytest.mark.parametrize(
    ("given", "runs_ahead", "can", "effective", "downgrade"),
    [
        (None, True, True, True, False),
        (None, False, True, False, False),
        (None, True, False, False, False),
        (True, False, True, True, False),
        (True, True, False, False, True),
        (False, True, True, False, False),
        (False, True, False, False, False),
    ],
)
def test_overlap_is_on_where_it_saves_time_unless_asked_otherwise(
    given: bool | None, runs_ahead: bool, can: bool, effective: bool, downgrade: bool
) -> None:
    limits = replace(LIMITS, runs_ahead=runs_ahead, can_overlap=can)
    found, row = choose_overlap(EngineConfig(overlap=given), limits)
    assert (found, row.downgrade) == (effective, downgrade)
    assert row.effective == ("on" if effective else "off")
    assert (row.reason == IN_TURN) == (not can and given is not False)
    assert (row.reason == "requested") == (given is not None and (can or not given))
    assert row.requested == {None: "auto", True: "on", False: "off"}[given]


@pytest.mark.parametrize(
    ("given", "keeps_state", "snapshots", "effective", "downgrade"),
    [
        ({}, False, 0, "on", False),
        ({}, True, 4, "on", False),
        ({}, True, 0, "off", False),
        ({"prefix_cache": True}, True, 0, "off", True),
        ({"prefix_cache": False}, True, 4, "off", False),
    ],
)
def test_prefixes_of_requests_that_keep_a_state_are_shared_only_with_places_for_it(
    given: dict[str, bool], keeps_state: bool, snapshots: int, effective: str, downgrade: bool
) -> None:
    limits = replace(LIMITS, keeps_state=keeps_state, num_snapshots=snapshots)
    row = choose_prefix_cache(resolve_config(given), limits)
    assert (row.effective, row.downgrade) == (effective, downgrade)
    assert ("4 snapshots" in row.reason) == (snapshots > 0 and effective == "on")


@pytest.mark.parametrize("name", ["/data/gemma", "gemma"])
def test_a_path_where_nothing_is_is_told_what_may_be_there(name: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no model at .* a name of the hub such as Qwen/Qwen3-0.6B"):
        model_folder(EngineConfig(model=name))


def test_what_a_checkpoint_says_of_sampling_is_what_transformers_reads_of_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    says = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
    transformers.GenerationConfig(do_sample=True, eos_token_id=[2, 5], **says).save_pretrained(tmp_path)
    found, row = choose_sampling(EngineConfig(), tmp_path)
    read = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert found == {name: getattr(read, name) for name in says} == says
    assert row.effective == "temperature 0.6, top_k 20, top_p 0.95, min_p 0.05, repetition_penalty 1.05"
    assert choose_sampling(EngineConfig(generation_config="none"), tmp_path)[0] == {}


@pytest.mark.parametrize(("says", "named"), [('"warm"', "temperature: 'warm'"), ("-1", "temperature: found -1")])
def test_what_no_request_could_say_of_sampling_ends_the_start_with_the_remedy(
    tmp_path: Path, says: str, named: str
) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"temperature": {says}, "top_k": null}}')
    with pytest.raises(ConfigError, match=f"generation_config.json.*{named}.*--generation-config none"):
        choose_sampling(EngineConfig(), tmp_path)


def test_without_parameters_a_model_draws_as_its_checkpoint_says(tmp_path: Path) -> None:
    folder = shutil.copytree(embedded_model(), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.5, "top_k": 7}')
    with LLM(str(folder), max_requests=1, threads=1) as llm:
        assert llm.default_params == SamplingParams(temperature=0.5, top_k=7)
        (output,) = llm.generate("Once upon a time")
        seeded = replace(llm.default_params, seed=output.outputs[0].seed)
        assert llm.generate("Once upon a time", seeded)[0].outputs[0].token_ids == output.outputs[0].token_ids
        assert [row.effective for row in llm.ledger.rows if row.topic == "sampling"] == ["temperature 0.5, top_k 7"]


def test_a_start_says_its_decisions() -> None:
    started = start(EngineConfig(max_requests=1, threads=1, prefix_cache=False))
    rows = {row.topic: row.effective for row in started.ledger.rows}
    started.worker.close()
    assert (rows["overlap"], rows["prefix cache"], rows["sampling"]) == ("off", "off", "as requests say")
    assert not started.overlap


def test_the_environment_is_read_with_the_configuration_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLCORE_DEVICE", "nowhere")
    started = start(EngineConfig(max_requests=1, threads=1))
    started.worker.close()
    assert started.choice.chosen.name == "cpu"
    with pytest.raises(DeviceError, match="'nowhere', from SGLCORE_DEVICE"):
        start(resolve_config({"max_requests": 1}))


def test_the_device_is_looked_for_below_the_root_that_was_given(tmp_path: Path) -> None:
    node = tmp_path / "dev" / "nvidia0"
    node.parent.mkdir()
    node.touch()
    with pytest.raises(DeviceError, match="'cuda' is present but not usable: driver: there is no libcuda"):
        start(EngineConfig(max_requests=1, threads=1, system_root=str(tmp_path)))


def test_a_child_process_starts_on_what_its_parent_chose_and_on_nothing_else() -> None:
    config = EngineConfig(max_requests=1, threads=1)
    started = start(config)
    started.worker.close()
    start(config, parent=started.choice.chosen).worker.close()
    with pytest.raises(DeviceError, match="found cpu:0 as the device; wanted cpu:1, as its parent"):
        start(config, parent=replace(started.choice.chosen, index=1))


def test_a_device_of_a_number_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="there is no device cpu:1, from --device; wanted one of cpu:0 "):
        start(EngineConfig(max_requests=1, threads=1, device="cpu:1"))


class Recorded:
    """A hub that records how it is asked, and has every model."""

    asked: ClassVar[list[tuple[Any, ...]]] = []
    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(
        self, progress: Any, revision: str | None = None, token: str | None = None, runs_code: bool = False
    ) -> None:
        self.how = (progress, revision, token, runs_code)

    def fetch(self, name: str) -> Path:
        self.asked.append((name, *self.how))
        return Path("/cache/models--o--m/snapshots") / self.commit / name.partition("/")[2]


def test_models_of_the_hub_are_fetched_as_the_configuration_says_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_module, "Hub", Recorded)
    monkeypatch.setattr(Recorded, "asked", [])
    config = EngineConfig(
        model="o/m", revision="v2", hf_token="t", trust_remote_code=True, draft_model="o/d", tp=2, max_requests=3
    )
    found, folder = fetched(config, no_progress)
    assert found == replace(config, revision=Recorded.commit) and folder.parent.name == Recorded.commit
    drafted = _with_draft(config, no_progress)
    assert drafted == replace(config, draft_model=str(folder.with_name("d")))
    assert Recorded.asked == [("o/m", no_progress, "v2", "t", True), ("o/d", no_progress, None, "t", False)]
    local = EngineConfig(model=str(embedded_model()), draft_model=str(embedded_model()))
    assert fetched(local, no_progress) == (local, embedded_model()) and _with_draft(local, no_progress) is local
    assert len(Recorded.asked) == 2


def test_a_path_may_begin_with_the_home_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert model_folder(EngineConfig(model="~/model")) == tmp_path / "model"


@pytest.mark.parametrize("failing", ["choose_overlap", "choose_prefix_cache"])
def test_a_worker_is_closed_if_the_start_fails_after_its_bring_up(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Worker:
        limits, closed = LIMITS, 0

        def close(self) -> None:
            self.closed += 1

    def fail(*given: Any) -> None:
        raise ConfigError("too late")

    worker = Worker()
    monkeypatch.setattr(start_module, "bring_up", lambda *given: ({"worker": worker}, {}))
    monkeypatch.setattr(start_module, failing, fail)
    with pytest.raises(ConfigError, match="too late"):
        start(EngineConfig(device="cpu"))
    assert worker.closed == 1


@pytest.mark.parametrize("widths", [{"dp": 2}, {"ep": 2}, {"tp": 3, "dp": 2}])
def test_shards_and_expert_ranks_without_ranks_for_them_are_refused(widths: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=" and ".join(f"{name} is {n}" for name, n in widths.items() if name != "tp")):
        start(EngineConfig(device="cpu", threads=1, max_requests=1, **widths))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("generates", [True, False])
def test_sampling_is_decided_for_models_that_generate(generates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(limits=replace(LIMITS, generates=generates))
    monkeypatch.setattr(start_module, "bring_up", lambda *given: ({"worker": worker}, {"load": 2.0}))
    started = start(EngineConfig(device="cpu"))
    assert ("sampling" in {row.topic for row in started.ledger.rows}) is generates
    assert started.seconds["load"] == 2.0 and "total" in started.seconds


def test_a_bring_up_ends_with_the_step_that_is_named() -> None:
    config = EngineConfig(device="cpu", threads=1)
    choice = choose(config, DecisionLedger())
    steps = resolve(choice.package.bring_up, choice.package.name).steps
    given = (config, embedded_model(), choice, DecisionLedger(), no_progress)
    built, seconds = bring_up(*given, last=steps[0].provides)
    assert steps[0].provides in built and steps[1].provides not in built and len(seconds) == 1
    with pytest.raises(BringUpError, match=f"has no step 'none'; wanted one of {steps[0].provides}, "):
        bring_up(*given, last="none")


def test_no_garbage_is_collected_during_a_start_and_afterwards_it_is_again() -> None:
    collects: list[bool] = []
    started = start(EngineConfig(max_requests=1, threads=1), lambda phase, done, total: collects.append(gc.isenabled()))
    started.worker.close()
    assert collects and not any(collects)
    assert gc.isenabled()


@pytest.mark.parametrize(
    "config", [EngineConfig(model="/nowhere"), EngineConfig(max_requests=1, threads=1, kv_cache_dtype="int3")]
)
def test_garbage_is_collected_again_after_a_start_that_failed(config: EngineConfig) -> None:
    with pytest.raises(ConfigError):
        start(config)
    assert gc.isenabled()


def test_a_start_leaves_a_collector_that_was_off_alone() -> None:
    gc.disable()
    try:
        start(EngineConfig(max_requests=1, threads=1)).worker.close()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_model_is_a_folder_with_a_configuration_or_a_gguf_file(tmp_path: Path) -> None:
    gguf, other, empty = tmp_path / "m.gguf", tmp_path / "other", tmp_path / "empty"
    gguf.write_bytes(b"GGUF" + bytes(20))
    other.write_bytes(b"text")
    empty.mkdir()
    assert [is_model(path) for path in (embedded_model(), gguf, other, empty, tmp_path / "none")] == [
        True, True, False, False, False
    ]  # fmt: skip
    assert model_folder(EngineConfig(model=str(gguf))) == gguf
    with pytest.raises(ConfigError, match="there is no model at .*other"):
        model_folder(EngineConfig(model=str(other)))


@pytest.mark.parametrize(
    ("given", "requested"), [({}, "auto"), ({"prefix_cache": True}, "on"), ({"prefix_cache": False}, "off")]
)
def test_the_ledger_says_what_was_requested_of_the_prefix_cache(given: dict[str, bool], requested: str) -> None:
    assert choose_prefix_cache(resolve_config(given, {}), LIMITS).requested == requested


def test_a_folder_has_a_draft_if_that_has_a_configuration(tmp_path: Path) -> None:
    assert has_draft(embedded_model()) and not has_draft(tmp_path)
    (tmp_path / "draft").mkdir()
    assert not has_draft(tmp_path)
    (tmp_path / "draft" / "config.json").write_text("{}")
    assert has_draft(tmp_path) and not has_draft(tmp_path / "draft")


@pytest.mark.parametrize("widths", [{"tp": 2}, {"dp": 2}, {"ep": 2}])
def test_ranks_are_started_as_is_said_and_looked_after(widths: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    worker: Any = SimpleNamespace(limits=LIMITS, check=lambda: None)

    def start_ranks(*given: Any) -> Any:
        asked.append(given)
        return worker, {"load": 2.0}

    monkeypatch.setattr("sglcore.engine.ranks.ranks_start.start_ranks", start_ranks)
    config: Any = EngineConfig(device="cpu", **widths)  # pyright: ignore[reportArgumentType]
    options: Any = "options"
    started = start(config, no_progress, ranks=options)
    assert asked == [(config, embedded_model(), started.choice, started.ledger, no_progress, options)]
    assert started.worker is worker and started.check is worker.check and started.seconds["load"] == 2.0
