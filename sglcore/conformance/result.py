"""The result of a run as data: device, versions, commit, the outcome of every law, and a digest of
all."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglcore.conformance.catalogue import LAWS
from sglcore.conformance.fixture import tolerance_values
from sglcore.conformance.gaps import Gap, gap_for
from sglcore.conformance.kit_run import Outcome
from sglcore.conformance.target import Target

DIGITS = 6


def make_result(
    target: Target,
    outcomes: Sequence[Outcome],
    gaps: Sequence[Gap],
    *,
    level: str,
    hardware: str,
    problems: Sequence[str],
    not_run: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the record of one run as plain values, with the digest. `hardware`: what it ran on,
    "simulated" if that was no hardware. `problems`: what is wrong with gaps and tolerances.
    `not_run`: requested cases without an outcome."""
    values: dict[str, Any] = {
        "device": target.name,
        "hardware": hardware,
        "level": level,
        "verdict": verdict(outcomes, gaps, problems, not_run),
        "versions": {
            target.distribution or target.name: target.version,
            **{name: _version(name) for name in ("sglcore", "torch", "numpy")},
        },
        "commit": _commit(),
        "machine": {"system": platform.platform(), "machine": platform.machine(), "python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gaps": [{**asdict(gap), "expiry": gap.expiry.isoformat()} for gap in gaps],
        "tolerances": tolerance_values(target.fixture(), LAWS, [(item.law, item.errors) for item in outcomes]),
        "problems": list(problems),
        **({"not_run": list(not_run)} if not_run else {}),
        "laws": [_law_values(outcome, gaps) for outcome in outcomes],
    }
    return {**values, "digest": digest(values)}


def verdict(
    outcomes: Sequence[Outcome], gaps: Sequence[Gap], problems: Sequence[str], not_run: Sequence[str] = ()
) -> str:
    """Return the verdict of a run: "failed" if there are problems or a failure without a gap; else
    "incomplete" if something did not run; else "gaps" if there are failures, or "passed"."""
    failed = [outcome for outcome in outcomes if outcome.verdict == "failed"]
    if problems or any(gap_for(gaps, outcome.name) is None for outcome in failed):
        return "failed"
    if not_run:
        return "incomplete"
    return "gaps" if failed else "passed"


def _law_values(outcome: Outcome, gaps: Sequence[Gap]) -> dict[str, Any]:
    gap = gap_for(gaps, outcome.name) if outcome.verdict == "failed" else None
    error = outcome.max_error
    return {
        "level": outcome.level,
        "law": outcome.name,
        "verdict": "gap" if gap is not None else outcome.verdict,
        "text": outcome.text,
        "seconds": round(outcome.seconds, 3),
        "max_error": None if error is None else float(f"{error:.{DIGITS}g}"),
    }


def digest(values: Mapping[str, Any]) -> str:
    """Return the sha256, in hexadecimal, of the canonical JSON of `values` without its "digest"."""
    content = {name: value for name, value in values.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_result(file: Path) -> dict[str, Any]:
    """Return the record in a file that `write_result` wrote; raises ValueError if its digest does
    not match its content, or if it is no JSON."""
    values = json.loads(file.read_text(encoding="utf-8"))
    if values.get("digest") != digest(values):
        raise ValueError(
            f"{file} was changed after it was written: its digest does not match; run `sglcore conform` again"
        )
    return values


def write_result(file: Path, values: Mapping[str, Any]) -> None:
    """Write a record as readable JSON, replacing the file; its folder is made if necessary."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the hash of the commit of the checkout that this sglcore runs from, with a "+" if
    files differ from it; empty outside a checkout."""
    folder = Path(__file__).parent
    try:
        head = subprocess.run(("git", "rev-parse", "HEAD"), cwd=folder, capture_output=True, text=True, check=True)
        dirty = subprocess.run(("git", "status", "--porcelain"), cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
