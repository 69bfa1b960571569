"""Start-up times: importing the package, listing devices, and the first token of the embedded
model.

python benchmarks/startup.py [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from results import machine, write_results

ROUNDS = 5
FIRST_TOKEN = (
    "from sglcore import LLM, SamplingParams\n"
    "with LLM(max_requests=1) as llm: llm.generate('Once upon a time', SamplingParams(max_tokens=1))"
)


def seconds(command: list[str]) -> float:
    """Return the wall-clock seconds of one process."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def main() -> None:
    """Measure, print, write the results."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--json", default=None)
    chosen = arguments.parse_args()
    bare = [sys.executable, "-c", "pass"]
    cases = {
        "import sglcore": ([sys.executable, "-c", "import sglcore"], bare, 100),
        "sglcore devices": ([sys.executable, "-m", "sglcore.cli", "devices"], None, 300),
        "embedded model to first token": ([sys.executable, "-c", FIRST_TOKEN], None, 5000),
    }
    rows = []
    for name, (command, base, limit) in cases.items():
        times = [seconds(command) - (seconds(base) if base else 0.0) for _ in range(ROUNDS)]
        row = {"what": name, "median_ms": round(statistics.median(times) * 1e3, 1), "limit_ms": limit}
        row["best_ms"] = round(min(times) * 1e3, 1)
        rows.append(row)
        print(row)
    if chosen.json:
        write_results(chosen.json, {"benchmark": "start-up", "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
