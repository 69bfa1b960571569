"""Installs the other engines as far as possible and makes their weight files; prints which could
not be installed, and why.

    python -m benchmarks.peers.install [ENGINE ...]

Each has its own environment below `build/peers`. torch is pinned to our version, so that pip takes
no other build.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from .checkpoint import make_checkpoint
from .engines import CHECKPOINT, FILES, PEERS, ROOT, Engine, chosen_engines

HOUR = 3600
QUANTIZED = {"bf16.gguf": "bf16", "q8_0.gguf": "q8_0", "q4_0.gguf": "q4_0"}


def main(names: list[str]) -> int:
    """Install and make files; always returns 0: an engine that can not be installed is a row of the
    table, not a failure."""
    make_checkpoint(CHECKPOINT)
    for engine in chosen_engines(names or None):
        try:
            install(engine)
            make_files(engine)
            engine.reason_file.unlink(missing_ok=True)
            print(f"{engine.title}: ready")
        except (OSError, subprocess.SubprocessError) as error:
            engine.reason_file.parent.mkdir(parents=True, exist_ok=True)
            engine.reason_file.write_text(reason(error) + "\n")
            print(f"{engine.title}: {reason(error)}")
    return 0


def install(engine: Engine) -> None:
    """Make the environment unless exactly these requirements are installed already. Waits."""
    wanted = "\n".join(engine.requirements)
    file = engine.installed_file
    if not engine.requirements or (file.is_file() and file.read_text() == wanted):
        return
    print(f"{engine.title}: installing {', '.join(engine.requirements)}", flush=True)
    venv.create(engine.home, with_pip=True)
    torch = f"torch=={version('torch')}"
    constraints = PEERS / "constraints.txt"
    constraints.write_text(torch + "\n")
    pip = [str(engine.python), "-m", "pip"]
    if engine.needs_torch:
        run([*pip, "install", "--quiet", torch])
    run([*pip, "install", "--quiet", "-c", str(constraints), *engine.requirements], **engine.variables)
    if engine.unwanted:
        run([*pip, "uninstall", "--quiet", "--yes", *engine.unwanted])
    file.write_text(wanted)


def make_files(engine: Engine) -> None:
    """Write the weights in the engine's own formats unless they exist. Waits."""
    for name in engine.models.values():
        target = FILES / name
        if target.exists():
            continue
        print(f"{engine.title}: writing {target.relative_to(ROOT)}", flush=True)
        if name in QUANTIZED:
            script = Path(__file__).with_name("write_gguf.py")
            run([str(engine.python), str(script), str(CHECKPOINT), str(target), QUANTIZED[name]], PYTHONPATH=str(ROOT))
        else:
            export_openvino(engine, target, name.rpartition("-")[2])


def export_openvino(engine: Engine, target: Path, form: str) -> None:
    """Export with optimum-intel and its default group sizes."""
    part = target.with_name(f"{target.name}.part")
    tool = str(engine.home / "bin" / "optimum-cli")
    task = ["--task", "text-generation-with-past", "--weight-format", form]
    run([tool, "export", "openvino", "-m", str(CHECKPOINT), *task, str(part)], HF_HUB_OFFLINE="1")
    part.rename(target)


def run(command: list[str], **variables: str) -> None:
    """Run a command with low priority and captured output, for at most an hour. Raises
    CalledProcessError with the output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    polite = ["nice", "-n", "10", *command]
    subprocess.run(polite, check=True, timeout=HOUR, capture_output=True, text=True, env=environment)


def reason(error: Exception) -> str:
    """Return one line: the last error line that the command printed, or the error itself."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or error.stdout or "").splitlines() if line.strip()]
        said = [line for line in lines if "error" in line.lower()]
        return (said or lines or [f"{error.cmd[3]} returned {error.returncode}"])[-1].strip()[:200]
    return f"{type(error).__name__}: {error}"[:200]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
