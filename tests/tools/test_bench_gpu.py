"""The accelerator benchmark: parts end independently, results are saved as they arrive, and every
path runs on a simulated device, so that a typo does not waste time on a real one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.on_gpu.parts import PARTS, with_needs
from benchmarks.on_gpu.sizes import DRY, REAL, Geometry
from benchmarks.on_gpu.table import table

ROOT = Path(__file__).resolve().parents[2]
MADE_UP = (sys.executable, "-m", "tests.tools.gpu_parts")
FIGURES = ("value", "us", "share", "bound_us", "tokens_a_second")


def supervised(tmp_path: Path, names: str, *words: str, seconds: float = 60) -> tuple[dict[str, Any], list[str], int]:
    """The content of the result file of made-up parts, the printed lines, and the exit code."""
    file = tmp_path / "found.json"
    command = (*MADE_UP, str(file), names, str(seconds), *words)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert not ran.stderr, ran.stderr
    return json.loads(file.read_text())["parts"], ran.stdout.splitlines(), ran.returncode


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for a condition that another process makes true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_part_that_raises_dies_or_hangs_ends_alone_with_its_reason(tmp_path: Path) -> None:
    found, printed, code = supervised(tmp_path, "quick,raises,dies,hangs,unimportable,second")
    assert {name: entry["verdict"] for name, entry in found.items()} == {
        "quick": "passed",
        "raises": "failed",
        "dies": "failed",
        "hangs": "overran",
        "unimportable": "failed",
        "second": "passed",
    }
    assert "AttributeError: 'Report' object has no attribute 'rwo'" in found["raises"]["reason"]
    assert "its process ended with -6: the driver gave up" in found["dies"]["reason"]
    assert "it was ended after 3 seconds" in found["hangs"]["reason"]
    assert "No module named 'no_such_module_at_all'" in found["unimportable"]["reason"]
    assert len(printed) == len(found) and code == 1
    hung = found["hangs"]["rows"][0]
    until(lambda: not is_running(hung["pid"]) and not is_running(hung["child"]))


def test_rows_skips_and_notes_are_kept_and_later_parts_see_them(tmp_path: Path) -> None:
    found, _, code = supervised(tmp_path, "quick,second")
    assert found["quick"]["rows"] == [{"value": 1}, {"value": 2}] and found["quick"]["about"] == "nothing"
    assert found["quick"]["skipped"] == [{"what": "another", "why": "it is not here"}]
    assert found["second"]["rows"] == [{"seen": [1, 2]}] and code == 0


def test_nothing_is_measured_after_a_wrong_result_unless_that_is_asked_for(tmp_path: Path) -> None:
    found, printed, _ = supervised(tmp_path, "wrong,quick")
    assert list(found) == ["wrong"] and found["wrong"]["reason"] == "two laws do not hold"
    assert "--go-on measures it all the same" in printed[-1]
    found, _, _ = supervised(tmp_path, "wrong,quick", "--go-on")
    assert [entry["verdict"] for entry in found.values()] == ["failed", "passed"]


def test_a_part_for_which_no_time_is_left_says_so(tmp_path: Path) -> None:
    found, _, code = supervised(tmp_path, "quick", seconds=0)
    assert (found["quick"]["verdict"], found["quick"]["reason"]) == ("left out", "0 seconds were left of all")
    assert code == 1


def test_who_kills_it_in_the_middle_keeps_what_was_measured_before(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = (*MADE_UP, str(file), "quick,long", "60")

    def rows() -> list[Any]:
        parts = json.loads(file.read_text())["parts"] if file.exists() else {}
        return parts.get("long", {}).get("rows", [])

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        until(lambda: bool(rows()))
        process.send_signal(signal.SIGKILL)
    left = json.loads(file.read_text())["parts"]
    assert left["quick"]["verdict"] == "passed" and len(left["quick"]["rows"]) == 2
    assert left["long"]["verdict"] == "running"
    until(lambda: not is_running(left["long"]["rows"][0]["pid"]))
    os.kill(left["long"]["rows"][0]["child"], signal.SIGKILL)


def test_a_part_brings_the_parts_that_it_stands_on() -> None:
    assert [part.name for part in with_needs(["products"])] == ["bounds", "products"]
    assert with_needs([]) == PARTS
    with pytest.raises(ValueError, match=r"there is no part prodcuts; wanted some of bounds, laws, products"):
        with_needs(["prodcuts"])


def test_all_limits_together_are_ten_minutes() -> None:
    assert sum(part.seconds for part in PARTS) <= 600
    assert {need for part in PARTS for need in part.needs} <= {part.name for part in PARTS}
    assert {part.of for part in PARTS} - {""} == set(REAL.geometries) == set(DRY.geometries)


def test_a_geometry_counts_the_bytes_and_operations_of_a_step() -> None:
    eight = REAL.geometries["8B"]
    assert eight.weights == 36 * (4096 * 6144 + 4096 * 4096 + 4096 * 24576 + 12288 * 4096) + 151_936 * 4096
    assert eight.kv_bytes == 147_456  # 144 KiB per token
    assert eight.step_bytes(32, 192) == 2 * eight.weights + 32 * 192 * 147_456
    small = Geometry(2, 3, 1, 1, 1, head_dim=2, vocab=10)
    products = 2 * 6 + 2 * 2 + 2 * 6 + 3 * 2
    assert small.prompt_flops(5) == 2 * 5 * products + 2 * 2 * 25 + 2 * 20


def test_the_table_shows_what_ran_and_says_what_did_not() -> None:
    row = {"what": "decode greedy", "size": 32, "us": 7000.0, "tokens_a_second": 4571.4, "share": 0.765}
    parts = {
        "bounds": {
            "verdict": "passed",
            "reason": "",
            "rows": [{"bound": "copy", "unit": "bytes/s", "value": 2.996e12}],
        },
        "engine-8B": {"verdict": "overran", "reason": "it was ended after 100 seconds", "rows": [row]},
        "peer-8B": {"verdict": "passed", "reason": "", "rows": []},
    }
    about = {"about": {"device": "Acme 100", "package": "sglcore-acme 1"}}
    parts = {name: {"skipped": [], "seconds": 1.0, **about, **entry} for name, entry in parts.items()}
    parts["peer-8B"]["skipped"] = [{"what": "peer", "why": "transformers is not installed"}]
    made = table({"dry": False, "date": "now", "machine": {"torch": "2.11.0", "commit": "abc"}, "parts": parts})
    assert made.startswith("Acme 100 (sglcore-acme 1), torch 2.11.0, commit abc, now")
    assert "copy 3 TB/s" in " ".join(made.split())
    assert "decode greedy 32 7,000 4,571 0.765" in " ".join(made.split())
    assert "engine-8B overran: it was ended after 100 seconds" in made
    assert "peer-8B skipped peer: transformers is not installed" in made and "NO FIGURES" not in made


def words(*names: str) -> list[str]:
    """The options that select these parts."""
    return [word for name in names for word in ("--part", name)]


def dry_run(folder: Path, *words: str, root: Path = ROOT) -> tuple[dict[str, Any], str, int]:
    """Run the benchmark on the simulated device of this machine; return its file, output and exit
    code."""
    file = folder / "gpu.json"
    command = (sys.executable, "-m", "sglcore_sim", "cuda", sys.executable, str(root / "benchmarks" / "gpu.py"))
    ran = subprocess.run(
        (*command, "--dry", "--json", str(file), *words),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
    )
    return json.loads(file.read_text()), ran.stdout + ran.stderr, ran.returncode


def check(found: dict[str, Any], printed: str, code: int) -> dict[str, Any]:
    """Check that all parts that ran passed, with rows but without figures; return the parts."""
    parts = found["parts"]
    assert code == 0, printed
    assert {entry["verdict"] for entry in parts.values()} == {"passed"}
    assert all(entry["rows"] for entry in parts.values())
    rows = [row for entry in parts.values() for row in entry["rows"]]
    assert {row[name] for row in rows for name in FIGURES if name in row} == {None}
    assert found["dry"] and "NO FIGURES" in printed
    return parts


def test_kernels_of_every_backend_go_through_on_a_simulated_device(tmp_path: Path) -> None:
    parts = check(*dry_run(tmp_path, *words("laws", "products", "attention")))
    assert list(parts) == ["bounds", "laws", "products", "attention"]
    assert [entry["skipped"] for entry in parts.values()] == [[], [], [], []]
    assert {row["function"] for row in parts["products"]["rows"]} >= {"torch"}
    backends = {row["backend"] for row in parts["attention"]["rows"]}
    assert backends == {"flashinfer", "flash_attention", "triton", "gathered", "reference", "torch"}


@pytest.mark.parametrize("model", REAL.geometries)
def test_a_model_its_kernels_and_its_peer_go_through_on_a_simulated_device(model: str, tmp_path: Path) -> None:
    names = [f"{kind}-{model}" for kind in ("engine", "profile", "peer")]
    parts = check(*dry_run(tmp_path, *words(*names)))
    assert set(parts) == {"bounds", *names}
    whose = {entry for row in parts[f"profile-{model}"]["rows"] for entry in row["entries"]}
    assert {"linear", "attention", "rms_norm", "embedding"} <= whose
    # transformers' model gets the same random weights by name, so the engine runs the same model.
    assert parts[f"peer-{model}"]["rows"][0]["first_tokens_alike"] == "6 of 6"


def test_the_parts_that_are_gone_through_are_all_that_there_are() -> None:
    models = [f"{kind}-{model}" for kind in ("engine", "profile", "peer") for model in REAL.geometries]
    assert {part.name for part in PARTS} == {"bounds", "laws", "products", "attention", *models}


def test_a_typo_in_one_part_is_found_and_costs_that_part_alone(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "benchmarks" / "on_gpu", tmp_path / "benchmarks" / "on_gpu")
    for name in ("gpu.py", "results.py"):
        shutil.copy(ROOT / "benchmarks" / name, tmp_path / "benchmarks" / name)
    broken = tmp_path / "benchmarks" / "on_gpu" / "products.py"
    text = broken.read_text()
    assert text.count("run.replayed_us(") == 1
    broken.write_text(text.replace("run.replayed_us(", "run.replaid_us("))
    found, printed, code = dry_run(tmp_path, *words("bounds", "products"), root=tmp_path)
    assert code == 1 and found["parts"]["bounds"]["verdict"] == "passed"
    entry = found["parts"]["products"]
    assert entry["verdict"] == "failed" and "'Run' object has no attribute 'replaid_us'" in entry["reason"]
    assert f"products failed: {entry['reason']}" in printed
