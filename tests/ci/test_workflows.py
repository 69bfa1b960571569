"""The stored workflows match the declarations of packages; every step is valid bash, and every
record is joined."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import validators

from ci import workflows
from ci.lanes import ROOT, Lane, LaneError, lanes
from tests.ci.github import Context, Job, WorkflowError, jobs, parsed
from tools import install_devices
from tools.installer.choice import version_for
from tools.installer.needs import InstallError, needs_of, takes

PUSH, BRANCH = Context(), Context("pull_request")
ALL_RUNNERS = {f"RUNNERS_{path.parent.name.upper()}": "yes" for path in ROOT.glob("devices/*/ci.toml")}
ONE_TOML = '[[lane]]\nname = "one"\ntorch = ["2.13.0"]\n'


def stored() -> str:
    """The workflow that runs on every push."""
    return (ROOT / workflows.FOLDER / workflows.FILE).read_text()


@cache
def spoken(script: str) -> str:
    """Return the errors of `bash -n` for a script; "" if there are none."""
    return subprocess.run(("bash", "-n"), input=script, capture_output=True, text=True).stderr


def problems(text: str, wanted: Sequence[Lane]) -> list[str]:
    """Return what is wrong with a workflow: steps that are not valid bash, lanes without a job, and
    records that no job joins."""
    try:
        found = jobs(text, PUSH)
    except WorkflowError as error:
        return [str(error)]
    said = [f"{job.name}, {step.name}: {spoken(step.run)}" for job in found for step in job.steps if spoken(step.run)]
    ran = [job for job in found if f"{workflows.VENV} -m ci run" in _bash(job)]
    for lane in wanted:
        own = [job for job in ran if f" -m ci run {lane.name} " in _bash(job)]
        if len(own) != max(1, len(lane.torch)):
            said.append(f"{len(own)} jobs run {lane.name}; wanted one for each torch")
        records = [name for job in own for name in _uploads(job) if name == f"record-{lane.name}"]
        said += [] if len(records) == 1 else [f"{lane.name} has {len(records)} records to join"]
        said += [
            f"{job.name} keeps no record"
            for job in own
            if f"build/lanes/{lane.name}.json" not in _uploads(job).values()
        ]
    names = [name for job in ran for name in _uploads(job)]
    ran = [job for job in ran if any(name.startswith("record-") for name in _uploads(job))]
    return [*said, *_unjoined(found, ran, names)]


def _unjoined(found: Sequence[Job], ran: Sequence[Job], names: Sequence[str]) -> list[str]:
    joining = [job for job in found if "ci table --records records" in _bash(job)]
    if len(joining) != 1:
        return [f"{len(joining)} jobs join the records; wanted one"]
    (job,) = joining
    said = [f"{job.name} does not wait for {other.name}" for other in ran if other.name not in job.needs]
    said += [] if "cancelled()" in job.condition and job.runs(PUSH) else [f"{job.name} does not run when a lane failed"]
    patterns = [step.given for step in job.steps if step.uses == "actions/download-artifact"]
    if [given.get("path") for given in patterns] != ["records"]:
        return [*said, f"{job.name} downloads to {patterns}"]
    told = [name for name in names if name.startswith("record-")]
    said += [f"{name} is not downloaded" for name in told if not Path(name).match(patterns[0]["pattern"])]
    return said + [f"two jobs upload {name}" for name in sorted({name for name in names if names.count(name) > 1})]


def _bash(job: Job) -> str:
    return "".join(step.run for step in job.steps)


def _uploads(job: Job) -> dict[str, str]:
    """Map the names of uploaded artifacts to their files."""
    given = [step.given for step in job.steps if step.uses == "actions/upload-artifact"]
    return {each["name"]: each["path"] for each in given}


def plant(root: Path, **texts: str) -> Path:
    """Make a checkout with packages and their workflows."""
    (root / workflows.FOLDER).mkdir(parents=True)
    for device, text in texts.items():
        (root / "devices" / device).mkdir(parents=True)
        (root / "devices" / device / "ci.toml").write_text(text)
    for name, text in workflows.texts(lanes(root), root).items():
        (root / workflows.FOLDER / name).write_text(text)
    return root


def test_the_stored_workflows_are_what_the_lanes_say() -> None:
    assert workflows.differences() == [], "run: python -m ci workflows --write"


def test_every_step_is_bash_every_lane_has_its_jobs_and_every_record_is_joined() -> None:
    assert problems(stored(), lanes()) == []


DEFECTS = (
    ("python3 -m venv .venv", 'if [ -n "" ]; then ; fi', "syntax error near unexpected token"),
    (
        "        run: |\n          python3 -m venv .venv\n",
        "        run: ${{ inputs.lane }}\n",
        "pastes an expression into bash",
    ),
    ("    runs-on:", "    runs-with:", "has runs-with; known: "),
    ("with: {fetch-depth: 0}", "with: {depth: 0}", "has depth; known: fetch-depth"),
    ("actions/checkout@v6", "actions/checkout", "known with a version"),
    ("run: {shell: bash}", "run: {shell: sh}", "the shell is sh"),
    ("-m ci run hip-sim", "-m ci run hip", "0 jobs run hip-sim"),
    ("build/lanes/clients.json", "build/lanes/client.json", "clients keeps no record"),
    ("-m ci table --records records", "-m ci table", "0 jobs join the records"),
    ('"clients", ', "", "table does not wait for clients"),
    ("    if: ${{ !cancelled() && inputs.lane == '' && inputs.tests == '' }}\n", "", "does not run when a lane failed"),
    ("pattern: record-*", "pattern: records-*", "record-clients is not downloaded"),
    ("name: record-clients", "name: record-mlx", "two jobs upload record-mlx"),
    ("name: record-clients", "name: again-clients", "clients has 0 records to join"),
    ('needs: ["', 'needs: ["gone", "', "table needs gone, and there is no such job"),
)


@pytest.mark.parametrize(("good", "bad", "said"), DEFECTS, ids=[said for _, _, said in DEFECTS])
def test_a_defect_in_a_workflow_is_caught(good: str, bad: str, said: str) -> None:
    text = stored()
    assert good in text
    assert said in "\n".join(problems(text.replace(good, bad), lanes()))


@pytest.mark.parametrize("bad", ["if true; then", "echo 'open", "(cd build"])
def test_what_a_lane_sets_up_is_checked_as_bash(bad: str) -> None:
    lane = replace(lanes()[0], setup=(bad,))
    said = problems(workflows.texts((lane,))[workflows.FILE], (lane,))
    assert len(said) == len(lane.torch) and all("setup: bash: line" in each for each in said)


def said_of_installs(text: str) -> list[str]:
    """Return the install commands of the jobs that the installer would refuse: for an unknown
    option, or a torch version that some package does not accept."""
    said = []
    for job in jobs(text, PUSH):
        line = next((line for line in _bash(job).splitlines() if "install_devices.py" in line), "")
        try:
            options = install_devices.parse(shlex.split(line)[2:])
            named = [] if options.processor else options.device
            needs = [found for name in ("cpu", *named) if (found := needs_of(ROOT / "devices" / name)) is not None]
            version = version_for(needs, options.torch)
            if options.all and takes(ROOT / "simulator", version) == options.without_simulator:
                raise InstallError(f"the simulator beside torch {version}")
        except (InstallError, SystemExit) as error:
            said.append(f"{job.name}: {error}")
    return said


def test_every_install_step_is_one_that_the_installer_takes() -> None:
    assert said_of_installs(stored()) == []


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ("--device hip --torch 2.11.0", "--device hip --torch 2.7.0", "hip-torch-2-11-0: torch 2.7.0 is not among"),
        (" --without-simulator", "", "cpu-torch-2-11-0: the simulator beside torch 2.11.0"),
        ("--processor --torch 2.13.0", "--cpu --torch 2.13.0", "hip-sim: 2"),
    ],
)
def test_an_install_step_that_the_installer_refuses_is_caught(good: str, bad: str, said: str) -> None:
    assert good in stored()
    assert any(each.startswith(said) for each in said_of_installs(stored().replace(good, bad)))


def schema_errors(text: str) -> list[str]:
    """Return the errors of GitHub's schema for a workflow."""
    schema = get_builtin_schema("vendor.github-workflows")
    return [error.message for error in validators.validator_for(schema)(schema).iter_errors(parsed(text))]


def test_every_workflow_has_githubs_schema() -> None:
    for path in sorted((ROOT / workflows.FOLDER).glob("*.yml")):
        assert schema_errors(path.read_text()) == [], path.name


@pytest.mark.parametrize(("good", "bad"), [("    runs-on:", "    runs-with:"), ("timeout-minutes: 90", "timeout: 90")])
def test_a_key_that_githubs_schema_does_not_have_is_caught(good: str, bad: str) -> None:
    assert schema_errors(stored().replace(good, bad, 1))


def test_lanes_on_githubs_machines_always_run_and_hardware_only_where_there_is_some() -> None:
    found = {job.name: job for job in jobs(stored(), PUSH)}
    for lane in lanes():
        own = [job for job in found.values() if f" -m ci run {lane.name} " in _bash(job)]
        equipped = replace(PUSH, vars=ALL_RUNNERS)
        for job in own:
            assert job.runs(equipped)
            assert job.runs(PUSH) == job.runs(BRANCH) == lane.is_hosted
            assert not job.runs(replace(equipped, event="pull_request")) or lane.is_hosted, "strangers' code on it"


def test_by_hand_one_lane_is_run_and_its_record_is_not_taken_for_all() -> None:
    by_hand = Context("workflow_dispatch", {"lane": "musa", "tests": "tests/laws"}, ALL_RUNNERS)
    found = jobs(stored(), by_hand)
    assert [job.name for job in found if job.runs(by_hand)] == ["musa"]
    assert found[0].steps[0].env == {"TESTS": "tests/laws"}


def test_a_changed_lane_would_be_seen(tmp_path: Path) -> None:
    root = plant(tmp_path, one=ONE_TOML)
    assert workflows.differences(root) == []
    (root / "devices" / "one" / "ci.toml").write_text(ONE_TOML.replace("2.13.0", "2.11.0"))
    assert workflows.differences(root) == [workflows.FILE]


def test_a_workflow_written_by_hand_is_left_alone_and_a_generated_one_that_is_gone_is_not(tmp_path: Path) -> None:
    folder = plant(tmp_path, one=ONE_TOML) / workflows.FOLDER
    (folder / "release.yml").write_text("name: release\n")
    (folder / "gone.yml").write_text(workflows.HEADER + "name: gone\n")
    assert workflows.differences(tmp_path) == ["gone.yml"]


def test_a_lane_of_an_environment_of_its_own_is_run_once_and_without_torch() -> None:
    lane = Lane(name="x-alone", device="x", capabilities=frozenset(), environment=("numpy",))
    text = workflows.texts((lane,))[workflows.FILE]
    assert "torch" not in text and problems(text, (lane,)) == []
    assert "install_devices" not in text and "pip install --quiet -c constraints.txt pytest" in text


def test_a_lane_says_its_image_what_that_lacks_its_setup_and_where_its_torch_is() -> None:
    lane = Lane(
        name="x-card",
        device="x",
        capabilities=frozenset(),
        runner=("self-hosted", "x"),
        image="registry/x:1",
        options="--device=/dev/x",
        packages=("git", "g++"),
        setup=("echo ready",),
        source="/opt/x/env.sh",
        torch=("2.13.0", "2.11.0"),
        vendor_torch=True,
    )
    text = workflows.texts((lane,))[workflows.FILE]
    first, second, _ = jobs(text, PUSH)
    assert (first.name, second.name, first.image) == ("x-card-torch-2-13-0", "x-card-torch-2-11-0", "registry/x:1")
    assert first.runs_on == ("self-hosted", "x") and 'options: "--device=/dev/x"' in text
    packages, checkout, setup, install, run, _ = first.steps
    assert packages.run.endswith(" git g++\n") and checkout.uses == "actions/checkout"
    assert "safe.directory" in setup.run and "echo ready" in setup.run
    assert install.run.startswith("source /opt/x/env.sh\npython3 -m venv --system-site-packages .venv\n")
    assert install.run.endswith(" --device x --torch 2.13.0\n") and run.run.startswith("source /opt/x/env.sh\n")


def test_a_torch_that_the_simulator_does_not_take_is_refused_and_left_beside_it_on_the_hosts_lane(
    tmp_path: Path,
) -> None:
    (tmp_path / "simulator").mkdir()
    (tmp_path / "simulator" / "pyproject.toml").write_text('[project]\ndependencies = ["numpy", "torch>=2.13,<2.16"]\n')
    host = Lane(name="h", device="h", capabilities=frozenset({"host"}), torch=("2.13.0", "2.11.0"))
    first, second, _ = jobs(workflows.texts((host,), tmp_path)[workflows.FILE], PUSH)
    assert "--without-simulator" not in _bash(first) and "--without-simulator --torch 2.11.0" in _bash(second)
    simulated = replace(host, name="s", simulator="x", capabilities=frozenset())
    with pytest.raises(LaneError, match="lane s requests torch 2.11.0, which the simulator does not support"):
        workflows.texts((simulated,), tmp_path)
