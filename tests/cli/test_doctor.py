"""`sglcore doctor` works on the machine that it must explain: with nothing installed, and with a
broken torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sglcore
from sglcore.cli import doctor
from sglcore.cli.doctor import Check, examine
from sglcore.device.system import System
from tests.device.site import Site

BROKEN = {
    "raises": "raise ImportError('libtorch.so: cannot open')",
    "exits": "raise SystemExit(3)",
    "dies": "import os; os.abort()",
}


def checks_of(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the checks by topic."""
    assert "Traceback" not in ran.stderr, ran.stderr
    return {check["topic"]: check for check in json.loads(ran.stdout)["checks"]}


@pytest.fixture
def bare(tmp_path: Path) -> Site:
    """A folder with the core's source and no installed distribution."""
    (tmp_path / "sglcore").symlink_to(Path(sglcore.__file__).parent)
    return Site(tmp_path)


def with_torch(site: Site, body: str = "__version__ = 'planted'", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run doctor with a `torch` that is a module of one line."""
    (site.path / "torch.py").write_text(body)
    return site.run("-m", "sglcore.cli.doctor", "--json", environ=environ)


def test_a_machine_where_all_is_installed_is_healthy(site: Site) -> None:
    ran = site.run("-m", "sglcore.cli", "doctor", "--json")
    checks = checks_of(ran)
    assert ran.returncode == 0, ran.stdout
    assert {"python", "numpy", "device cpu: hardware", "choice", "memory", "compiler", "torch"} <= set(checks)
    assert checks["choice"]["found"].startswith("cpu")


def test_with_nothing_but_the_standard_library_every_missing_part_has_a_remedy(bare: Site) -> None:
    ran = bare.run("-S", "-m", "sglcore.cli.doctor", "--json")
    checks = checks_of(ran)
    assert ran.returncode == 1
    for name in ("sglcore", "numpy", "typer", "rich"):
        assert (checks[name]["verdict"], checks[name]["remedy"]) == ("bad", f"pip install {name}")
    assert checks["devices"]["remedy"] == "pip install sglcore-cpu"
    assert checks["torch"]["verdict"] == "note"


def test_the_console_start_works_with_nothing_installed_too(bare: Site) -> None:
    ran = bare.run("-S", "-m", "sglcore.cli", "doctor")
    assert ran.returncode == 1 and ran.stderr == ""
    assert "-> pip install typer" in ran.stdout
    assert ran.stdout.startswith("something will not run: ")


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_torch_is_a_finding(site: Site, how: str) -> None:
    check = checks_of(with_torch(site, BROKEN[how]))["torch"]
    assert check["verdict"] == "bad"
    assert check["remedy"] == "reinstall torch==2.13.0"


def test_a_torch_that_never_ends_importing_is_a_finding(site: Site) -> None:
    ran = with_torch(site, "import time; time.sleep(60)", SGLCORE_DOCTOR_TORCH_SECONDS="0.2")
    check = checks_of(ran)["torch"]
    assert check["found"] == "import torch did not end in 0.2 s"


def test_a_package_that_raises_is_a_finding_with_its_traceback(site: Site) -> None:
    site.add("one", body="raise RuntimeError('the driver is too old')")
    ran = with_torch(site)
    checks = checks_of(ran)
    assert ran.returncode == 1
    found = checks["device one"]
    assert "planted_one" in found["found"] and "RuntimeError: the driver is too old" in found["found"]
    assert "--device NAME of another starts without it" in found["remedy"] and "doctor" not in found["remedy"]
    assert checks["choice"]["verdict"] == "ok" and checks["choice"]["found"].startswith("cpu")


def test_the_devices_of_a_package_and_what_hides_others_are_findings(site: Site) -> None:
    site.add("one", devices=2, hidden="ONES='0,2' shows 2 of 3")
    checks = checks_of(with_torch(site))
    assert checks["device one:1"]["found"] == "planted 1, memory unknown, use unknown"
    assert (checks["device one: hidden"]["verdict"], checks["device one: hidden"]["found"]) == (
        "note",
        "ONES='0,2' shows 2 of 3",
    )


def test_an_absent_accelerator_is_a_note_and_an_unusable_one_is_bad(site: Site) -> None:
    site.add("one", hardware=False)
    site.add("two", runtime=False)
    site.add("three", runtime=False, wanted=True, devices=0, hidden="ONES='' shows 0 of 2")
    checks = checks_of(with_torch(site))
    assert checks["device one: hardware"]["verdict"] == checks["device three: runtime"]["verdict"] == "note"
    assert checks["device two: runtime"]["verdict"] == "bad"
    assert checks["choice"]["verdict"] == "bad"


def test_a_device_that_was_asked_for_by_name_is_probed_as_such(site: Site) -> None:
    site.add("one", hardware=False, offered=True)
    unnamed = checks_of(with_torch(site))
    assert unnamed["device one: hardware"]["verdict"] == "note" and unnamed["choice"]["found"].startswith("cpu")
    named = checks_of(with_torch(site, SGLCORE_DEVICE="one"))
    assert named["device one: hardware"]["verdict"] == "ok" and named["choice"]["found"].startswith("one")


@pytest.mark.parametrize(
    ("requirement", "said", "remedy"),
    [
        ("torch>=2.11,<2.14", "not installed; needed by sglcore-one", "pip install torch==2.13.0"),
        ("torch-one==1", "not installed, and no installed device package needs it", ""),
        ("torch>=2; extra == 'more'", "not installed, and no installed device package needs it", ""),
    ],
)
def test_an_absent_torch_matters_if_an_installed_device_package_requires_it(
    bare: Site, requirement: str, said: str, remedy: str
) -> None:
    bare.add("one")
    metadata = next(bare.path.glob("*one*.dist-info")) / "METADATA"
    metadata.write_text(metadata.read_text().rstrip() + f"\nRequires-Dist: {requirement}\n")
    check = checks_of(bare.run("-S", "-m", "sglcore.cli.doctor", "--json"))["torch"]
    assert (check["verdict"], check["found"], check["remedy"]) == ("note", said, remedy)


def test_a_reader_that_leaves_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    found = subprocess.run(
        [sys.executable, "-m", "sglcore.cli", "doctor", "--json"], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (found.returncode, found.stderr) == (128 + signal.SIGPIPE, "")


def test_a_variable_that_nobody_reads_is_noted(site: Site) -> None:
    checks = checks_of(with_torch(site, SGLCORE_DEVICE="cpu", SGLCORE_DEVISE="cpu"))
    assert checks["SGLCORE_DEVICE"]["remedy"] == ""
    assert checks["SGLCORE_DEVISE"]["remedy"] == "unset it, or correct its name"


def test_variables_of_the_server_are_read_and_a_secret_is_not_shown(site: Site) -> None:
    given = {
        "SGLCORE_PORT": "80",
        "SGLCORE_HOST": "::1",
        "SGLCORE_API_KEY": "k3y",
        "SGLCORE_HF_TOKEN": "t0k",
        "SGLCORE_API_KEI": "k3i",
    }
    ran = with_torch(site, **given)
    checks = checks_of(ran)
    assert [checks[name]["found"] for name in given] == [
        "80",
        "::1",
        *["set; its value is secret"] * 2,
        "set, but sglcore does not read it",
    ]
    assert all(not checks[name]["remedy"] for name in list(given)[:4])
    assert not {"k3y", "t0k", "k3i"} & set(ran.stdout.replace('"', " ").split())


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_library_is_its_own_fault_and_not_torchs(site: Site, how: str) -> None:
    (site.path / "numpy.py").write_text(BROKEN[how])
    (site.path / "tokenizers.py").write_text("print('chatter')\nraise OSError('bad wheel\\nundefined symbol')")
    checks = checks_of(with_torch(site, "import numpy"))
    assert (checks["numpy"]["verdict"], checks["torch"]["verdict"]) == ("bad", "bad")
    assert "import numpy fails" in checks["numpy"]["found"]
    assert checks["numpy"]["remedy"].startswith("pip install --force-reinstall numpy==")
    assert checks["torch"]["remedy"] == "repair numpy, which torch imports"
    assert checks["tokenizers"]["found"].endswith("import tokenizers fails: OSError: undefined symbol")
    assert checks["safetensors"]["verdict"] == checks["pyzmq"]["verdict"] == "ok"


def test_an_examination_that_raises_is_a_finding_and_the_others_go_on() -> None:
    def broken() -> list[Check]:
        raise OSError("no such file")

    first, second = examine({"memory": broken, "python": doctor.check_python})
    assert (first.topic, first.verdict) == ("memory", "bad") and "OSError: no such file" in first.found
    assert second.topic == "python"


@pytest.mark.parametrize(
    ("limit", "verdict", "said"),
    [("max\n", "ok", "in the machine"), (f"{1 << 30}\n", "bad", "limited to 1.0 GiB by the control group")],
)
def test_the_limit_of_any_control_group_of_the_process_counts(
    tmp_path: Path, limit: str, verdict: str, said: str
) -> None:
    group = tmp_path / "sys/fs/cgroup/outer"
    (group / "inner").mkdir(parents=True)
    (group / "memory.max").write_text(limit)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    (check,) = doctor.check_memory(System(tmp_path))
    assert check.verdict == verdict and check.found.endswith(said)
