"""Measures an accelerator in ten minutes: its bounds, and the engine's kernels, attention and steps
as shares of them.

Every part runs in its own process with its own time limit; results are written to the file as they
come, and a table is printed last. Laws of the conformance kit run first on this device; if they
fail, nothing is measured.

    python benchmarks/gpu.py [--part NAME]... [--seconds N] [--device NAME] [--set NAME=VALUE]...
        [--json FILE] [--go-on]
    python -m sglcore_sim cuda python benchmarks/gpu.py --dry

`--dry` runs every path of the code at sizes for a simulated device, and gives no figures.
"""

from __future__ import annotations

import argparse
import platform
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from on_gpu.child import Report, call, serve
from on_gpu.parts import PARTS, Part, with_needs
from on_gpu.supervisor import Results, supervise
from on_gpu.table import table
from results import machine

IMPORTS = ("torch", "sglcore.engine.core", "sglcore.runtime.bring_up", "sglcore.models.weights.model_loader")
"""Modules that take seconds to import and touch no device."""
DRY_SECONDS = 20
"""Factor of a part's time limit in a dry run, which may be on a slow machine."""


def main(words: list[str] | None = None) -> int:
    """Measure the chosen parts; returns 1 if one of them failed."""
    chosen = _options(words)
    parts = [_slower(part) if chosen.dry else part for part in with_needs(chosen.part)]
    if chosen.child:
        (part,) = (part for part in parts if part.name == chosen.child)
        serve(part, IMPORTS, lambda part, report, earlier: _measure(chosen, part, report, earlier))
    # Exit normally, so that the parts end and the results are printed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = Results(Path(chosen.json), _about(chosen))
    command = [sys.executable, __file__, *_own_words(chosen)]
    seconds = chosen.seconds * (DRY_SECONDS if chosen.dry else 1)
    try:
        passed = supervise(parts, command, results, seconds, goes_on=chosen.go_on)
    finally:
        print(f"\n{table(results.content)}\n\nwritten to {results.file}", flush=True)
    return 0 if passed else 1


def _about(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return date, machine, commit and settings. In a copy without git, `--commit` gives the
    commit."""
    made = machine()
    made |= {"host": platform.node(), "system": platform.platform(), "commit": chosen.commit or made["commit"]}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "dry": chosen.dry, "machine": made, "settings": _settings(chosen)}


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--part", action="append", default=[], metavar="NAME", help=f"only this part: {names}")
    parser.add_argument("--seconds", type=float, default=570, metavar="N", help="of all parts (default 570)")
    parser.add_argument("--device", help="the device, if it is not the only accelerator")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of every engine")
    parser.add_argument("--json", default="build/bench/gpu.json", metavar="FILE", help="where results are written")
    parser.add_argument("--go-on", action="store_true", help="measure although laws do not hold")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, every path, no figures")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def _own_words(chosen: argparse.Namespace) -> list[str]:
    """Return the options that a part's process gets in addition to the part."""
    words = ["--dry"] if chosen.dry else []
    words += ["--device", chosen.device] if chosen.device else []
    return words + [word for given in chosen.set for word in ("--set", given)]


def _settings(chosen: argparse.Namespace) -> dict[str, str]:
    return dict(given.split("=", 1) for given in chosen.set)


def _slower(part: Part) -> Part:
    return replace(part, seconds=part.seconds * DRY_SECONDS)


def _measure(chosen: argparse.Namespace, part: Part, report: Report, earlier: Mapping[str, Any]) -> None:
    from on_gpu.run import Run
    from on_gpu.sizes import DRY, REAL

    settings = {**_settings(chosen), **({"device": chosen.device} if chosen.device else {})}
    call(part, Run(report, DRY if chosen.dry else REAL, settings, earlier, part.of))


if __name__ == "__main__":
    sys.exit(main())
