"""Checks correctness first: runs the laws of the conformance kit for the kernels, attention and
graphs that later parts measure."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from sglcore.cli.__main__ import main
from sglcore.conformance.target import find_target

from .child import PartFailed
from .run import Run

LAWS = ("kernel_is_reference", "attention_is_reference", "replay_is_eager", "tiny")
ENTRIES = (
    *("linear", "rms_norm", "rotary", "silu_and_mul", "gated_linear", "embedding", "head", "draw", "greedy"),
    *("store_kv", "cache_locations"),
)
"""Words in the names of kernel entries that a dense model's step runs."""
OTHERS = ("mxfp4", "moe", "latent", "sparse", "limited", "grouped_linear", "gated_rms_norm")
"""Words that exclude an entry."""


def measure(run: Run) -> None:
    """Report a row for each law. Raises PartFailed with the laws that fail."""
    preferred = next(iter(find_target(run.package.name).usable_attention()), "")
    for note in ("state", "about"):
        run.report.note(**{note: getattr(run, note)()})
    words = _words(preferred, run.is_dry)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        chosen = [name for name in ("kernels", "attention_backend") if name in run.settings]
        settings = [word for name in chosen for word in ("--set", f"{name}={run.settings[name]}")]
        laws = [word for name in LAWS for word in ("--law", name)]
        code = main(
            ["conform", run.package.name, "--level", "C3", *laws, *settings, "--result", str(file), "--", "-k", words]
        )
        if not file.is_file():
            raise PartFailed(f"the kit ended with {code} and wrote no result")
        result = json.loads(file.read_text(encoding="utf-8"))
    for law in result["laws"]:
        run.report.row(**{name: law.get(name) for name in ("law", "verdict", "max_error", "seconds")})
    wrong = [f"{law['law']}: {law['text'][:200]}" for law in result["laws"] if law["verdict"] == "failed"]
    if wrong or not result["laws"]:
        raise PartFailed("; ".join(wrong) or "the kit ran no law")


def _words(attention: str, is_dry: bool) -> str:
    """Return the expression for pytest's `-k` that selects the cases."""
    if is_dry:
        return "tiny and dense or kernel_is_reference and silu_and_mul and not limited"
    entries = f"kernel_is_reference and ({' or '.join(ENTRIES)}) and not ({' or '.join(OTHERS)})"
    backend = f"attention_is_reference and {attention} and not (sinks or softcap)" if attention else "tiny"
    return f"({entries}) or ({backend}) or (replay_is_eager and full and dense) or (tiny and dense)"
