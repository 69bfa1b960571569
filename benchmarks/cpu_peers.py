"""Compares sglcore with other engines on this CPU, and all of them with the machine's bounds.

Random weights in the geometry of Qwen3-0.6B. Every engine is a child process in its own
environment; all loaded engines are stopped except the measured one. Each round runs every case once
on each engine, so a ratio compares readings that are minutes apart. Memory bandwidth and peak
matrix throughput are measured in the same run.

    make bench-cpu                                   # install what can be installed, then all of it
    python benchmarks/cpu_peers.py [--engines sglcore,vllm] [--cases b1,prefill] [--rounds N]
        [--quick]
                                   [--json FILE] [--png FILE]
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path

from peers.cases import CASES, Case, chosen_cases
from peers.checkpoint import make_checkpoint
from peers.engines import CHECKPOINT, ENGINES, Engine, chosen_engines
from peers.figures import beside_itself, beside_the_best, rows, table
from peers.measure import Measurement
from peers.picture import save_roofline
from results import machine, write_results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns 1 if sglcore has no figure in any case."""
    options = parse(arguments)
    make_checkpoint(CHECKPOINT)
    measured = Measurement(options.engines, options.cases, options.rounds, say)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measured.run(lambda: write(options, measured))
    except KeyboardInterrupt:
        say("interrupted; what was measured follows")
    found = write(options, measured)
    print(f"\n{table(found)}")
    print()
    for each in beside_the_best(found):
        print(f"ours beside the best peer, {each['case']}: {ratio_text(each)}, {each['peer']}")
    for each in beside_itself(measured.results):
        print(f"ours, {each['case']} / {each['against']}: {ratio_text(each)}")
    print(tokens_text(measured))
    if options.png:
        draw(options.png, found, options.cases, measured)
    return 0 if any(row["engine"] == "sglcore" and "median" in row for row in found) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options; names become engines and cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", help=f"of {','.join(engine.name for engine in ENGINES)} (all)")
    parser.add_argument("--cases", help=f"of {','.join(case.name for case in CASES)} (all)")
    parser.add_argument("--rounds", type=int, help="how often each case runs on each engine (5; 1 if quick)")
    parser.add_argument("--quick", action="store_true", help="one round of a few short cases")
    parser.add_argument("--json", help="write the results, after every round")
    parser.add_argument("--png", help="draw the roofline; needs matplotlib")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 5)
    try:
        options.engines = chosen_engines(options.engines.split(",") if options.engines else None)
        options.cases = chosen_cases(options.cases.split(",") if options.cases else None, options.quick)
    except ValueError as error:
        parser.error(str(error))
    return options


def write(options: argparse.Namespace, measured: Measurement) -> list[dict[str, object]]:
    """Return the rows so far; writes them to the result file if there is one."""
    found = rows(measured.results, options.cases, [engine.name for engine in options.engines], measured.bounds)
    if options.json:
        content: dict[str, object] = {
            "benchmark": "engines on a processor, random weights in the geometry of Qwen3-0.6B",
            "machine": machine(),
            "versions": {engine.name: engine_version(engine) for engine in options.engines},
            "rounds": options.rounds,
            "load_average": measured.loads,
            "bounds": None if measured.bounds is None else bounds_content(measured),
            "rows": found,
            "beside_the_best": beside_the_best(found),
            "beside_itself": beside_itself(measured.results),
            "first_tokens": {f"{engine} {form}": ids for (form, engine), ids in measured.results.tokens.items()},
        }
        write_results(options.json, content)
    return found


def bounds_content(measured: Measurement) -> dict[str, object]:
    """Return the bounds in readable units."""
    assert measured.bounds is not None
    peaks = {f"{kind}_gflops": round(rate / 1e9) for kind, rate in measured.bounds.peaks.items()}
    return {"gb_per_s": round(measured.bounds.bandwidth / 1e9, 2), "threads": measured.threads, **peaks}


def engine_version(engine: Engine) -> str | None:
    """Return the version in the engine's environment; None if it is not installed."""
    libraries = [str(path) for path in (engine.home / "lib").glob("python*/site-packages")]
    found: list[Distribution] = list(distributions(name=engine.distribution, path=libraries))
    return found[0].version if found else None


def tokens_text(measured: Measurement) -> str:
    """Say whether engines with bf16 weights continue a fixed prompt with the same token, as they
    must if they run the same model."""
    firsts = {engine: ids[0] for (form, engine), ids in measured.results.tokens.items() if form == "bf16" and ids}
    if len(set(firsts.values())) <= 1:
        return f"same first token by {', '.join(firsts) or 'nobody'}"
    return f"the first tokens differ: {firsts}"


def ratio_text(each: dict[str, object]) -> str:
    """Format a ratio's median, minimum and maximum."""
    ratio = each["ratio"]
    assert isinstance(ratio, dict)
    return f"{ratio['median']} ({ratio['min']} to {ratio['max']})"


def draw(file: str, found: list[dict[str, object]], cases: Sequence[Case], measured: Measurement) -> None:
    """Draw the roofline, or print why it is not drawn."""
    if measured.bounds is None:
        say("no picture: the bounds could not be measured")
        return
    try:
        save_roofline(Path(file), found, cases, measured.bounds)
    except ModuleNotFoundError as error:
        say(f"no picture: {error}; pip install matplotlib")


def say(text: str) -> None:
    """Print progress with the time."""
    print(f"{datetime.now():%H:%M:%S} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
