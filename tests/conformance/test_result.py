"""A result names device and machine, its digest covers its content, and the support table comes
from results only."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sglcore.cli.__main__ import main
from sglcore.conformance.gaps import Gap
from sglcore.conformance.kit_run import Outcome
from sglcore.conformance.reference_parts import REFERENCE
from sglcore.conformance.result import digest, make_result, read_result, write_result
from sglcore.conformance.support_table import BEGIN, END, support_table, with_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "conformance"
GAP = Gap("tiny[moe]", "experts", "https://example.org/1", datetime.date(2030, 1, 1))
OUTCOMES = (
    Outcome("tiny", "C1", "dense", "passed", "", 0.5, {"float32": 1.2345678e-6}),
    Outcome("tiny", "C1", "moe", "failed", "differs", 0.5, {"float32": 0.5}),
    Outcome("retraction", "C2", "", "skipped", "pages are too large", 0.0, {}),
)


def result(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"level": "C2", "hardware": "simulated", "problems": (), **changes}
    return make_result(REFERENCE, OUTCOMES, [GAP], **given)


def test_it_says_what_ran_where_and_with_which_versions() -> None:
    values = result()
    assert values["device"] == "reference" and values["hardware"] == "simulated" and values["verdict"] == "gaps"
    assert set(values["versions"]) == {"sglcore", "torch", "numpy"} and values["versions"]["torch"].startswith("2.")
    assert values["machine"]["python"] and values["date"]
    assert [law["verdict"] for law in values["laws"]] == ["passed", "gap", "skipped"]
    assert values["laws"][0]["law"] == "tiny[dense]" and values["laws"][0]["max_error"] == 1.23457e-06
    assert values["gaps"] == [{"law": GAP.law, "reason": GAP.reason, "link": GAP.link, "expiry": "2030-01-01"}]


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    values = result()
    assert values["digest"] == digest(values) and len(values["digest"]) == 64
    write_result(tmp_path / "new" / "result.json", values)
    assert read_result(tmp_path / "new" / "result.json") == values
    (tmp_path / "changed.json").write_text(json.dumps({**values, "verdict": "passed"}))
    with pytest.raises(ValueError, match="changed after it was written"):
        read_result(tmp_path / "changed.json")


def test_the_table_has_a_row_for_each_result_and_says_what_was_simulated(tmp_path: Path) -> None:
    write_result(tmp_path / "b.json", result(hardware="board B"))
    write_result(tmp_path / "a.json", result())
    head, rule, first, second = support_table(tmp_path).splitlines()
    assert head.startswith("| device | ran on | C0 |") and set(rule) <= set("|- ")
    assert "| reference | board B | not run | 1 passed, 1 gap | 1 skipped | not run | not run | 1 |" in first
    assert "| reference | simulated |" in second
    assert result()["digest"][:12] in second


def test_a_table_is_put_between_its_marks() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_table(text, "new\n") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="lacks"):
        with_table("no marks", "new\n")


def test_the_documents_table_is_that_of_the_committed_results() -> None:
    text = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    assert text == with_table(text, support_table(RESULTS)), (
        "run: sglcore conform --table benchmarks/results/conformance"
    )


def test_every_committed_result_says_on_what_it_ran() -> None:
    for file in RESULTS.glob("*.json"):
        values = read_result(file)
        assert values["hardware"], file
        assert values["verdict"] in ("passed", "gaps"), file


@pytest.mark.parametrize(
    ("text", "said"), [(json.dumps({**result(), "verdict": "passed"}), "was changed after"), ("{", "Expecting")]
)
def test_the_command_names_a_result_that_it_cannot_read(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text(text)
    assert main(["conform", "--table", str(tmp_path)]) == 2
    found = capsys.readouterr().err
    assert said in found and str(tmp_path) in found and "Traceback" not in found


OLDEST = datetime.timedelta(days=30)
"""How much older than the kit's last change of laws a result may be."""


def git(*words: str) -> str:
    """Return what git says of this checkout; skips the test where there is no history."""
    found = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("needs a git checkout")
    return found.stdout.strip()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_is_not_much_older_than_the_laws_that_it_speaks_of(path: Path) -> None:
    if git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("needs the history of the checkout")
    laws = datetime.date.fromisoformat(git("log", "-1", "--format=%cs", "--", "sglcore/conformance/laws"))
    measured = datetime.date.fromisoformat(read_result(path)["date"])
    assert laws - measured <= OLDEST, f"run it again: sglcore conform {path.stem.partition('-')[0]} --result {path}"
