"""Every text decoder that the installed transformers has, as a tiny random model: by its own forward, and by this engine.

    python tools/sweep_models.py                    # all types: a line each, and build/sweep/models.json
    python tools/sweep_models.py gemma2 gpt_oss     # some
    python tools/sweep_models.py --write            # all, and what follows from it: docs/models.md, the list of proven types

Compared are log-probabilities in float32: a prompt in random chunks beside another request, then single tokens of both,
ragged, as decode steps; then what the scheduler serves, with prefix hits and retraction. Each type runs in a child process with bounded memory and time. Needs a machine without a device.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from sglcore.device.errors import SglcoreError  # noqa: E402
from tests.models.transformers_cases import compare, compare_served, tiny_model  # noqa: E402

EQUAL = 2e-4
"""The greatest difference of log-probabilities that counts as equal."""
SMALL = 3_000_000
"""Parameters of a tiny model at most; a configuration that gives more was not shrunk."""
SECONDS, BYTES = 90, 6 << 30
TYPES = ROOT / "sglcore" / "models" / "transformers_types.py"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- written by tools/sweep_models.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Verdict:
    """What became of one type: equal, differs, refused (with the engine's words) or failed (before anything was compared)."""

    kind: str
    verdict: str
    error: float | None = None
    says: str = ""


def sweep_one(kind: str, sizes: dict[str, Any]) -> Verdict:
    """Compare one type."""
    try:
        with torch.device("meta"):
            count = sum(
                each.numel() for each in AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes)).parameters()
            )
        if count > SMALL:
            return Verdict(kind, "failed", says=f"{count} parameters: the configuration is not shrunk")
        model = tiny_model(kind, sizes)
    except Exception as error:
        return Verdict(kind, "failed", says=_line(error))
    try:
        with tempfile.TemporaryDirectory() as folder:
            error = max(compare(model, Path(folder)), compare_served(model, Path(folder)))
    except SglcoreError as refusal:
        return Verdict(kind, "refused", says=_line(refusal))
    except Exception as error:
        return Verdict(kind, "failed", says=_line(error))
    return Verdict(kind, "equal" if error <= EQUAL else "differs", error)


def _line(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return (
        text
        if isinstance(error, SglcoreError)
        else f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
    )


def in_child(kind: str, sizes: dict[str, Any]) -> Verdict:
    """The same in a process of its own, which may take too much or too long."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        signal.alarm(SECONDS)
        os.write(writer, json.dumps(asdict(sweep_one(kind, sizes))).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return (
        Verdict(**json.loads(said)) if said else Verdict(kind, "failed", says=f"the process ended with status {status}")
    )


def main() -> None:
    """Sweep, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = tomllib.loads((ROOT / "tools" / "sweep_models.toml").read_text())
    kinds = options.types or [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING]
    verdicts: list[Verdict] = []
    for kind in kinds:
        sizes = {**table["base"], **table["types"].get(kind, {})}
        verdicts.append(in_child(kind, sizes))
        found = verdicts[-1]
        print(kind, found.verdict, "" if found.error is None else f"{found.error:.2g}", found.says, flush=True)
    counts = {
        name: sum(each.verdict == name for each in verdicts) for name in ("equal", "differs", "refused", "failed")
    }
    print(counts)
    out = ROOT / "build" / "sweep" / "models.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    told = {"transformers": transformers.__version__, "types": [asdict(each) for each in verdicts]}
    out.write_text(json.dumps(told, indent=1))
    if options.write:
        if options.types:
            parser.error("--write takes all types")
        write(verdicts)


def write(verdicts: Sequence[Verdict]) -> None:
    """The list of proven types, and the table of docs/models.md."""
    equal = sorted((each.kind, each.error or 0.0) for each in verdicts if each.verdict == "equal")
    names = "".join(f'        "{kind}",\n' for kind, _ in equal)
    head = TYPES.read_text().partition("VERSION = ")[0]
    version = f'VERSION = "{transformers.__version__}"\n"""The transformers that was compared."""\n\n'
    TYPES.write_text(f"{head}{version}PROVEN: frozenset[str] = frozenset(\n    {{\n{names}    }}\n)\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    rows = [f"| `{kind}` | {error:.1e} |" for kind, error in equal]
    others = [f"| `{each.kind}` | {_why(each)} |" for each in verdicts if each.verdict != "equal"]
    table = "\n".join(["| type | greatest difference |", "|---|---|", *rows])
    table += "\n\n" + "\n".join(["| not served | why |", "|---|---|", *others])
    said = f"{len(equal)} of {len(verdicts)} types of transformers {transformers.__version__} are equal.\n\n"
    PAGE.write_text(f"{before}{BEGIN}\n\n{said}{table}\n\n{END}{rest.partition(END)[2]}")


def _why(found: Verdict) -> str:
    """In a cell of a table."""
    if found.verdict == "differs":
        return f"its log-probabilities differ by {found.error:.2g}"
    what = {"refused": "refused", "failed": "not compared"}[found.verdict]
    return f"{what}: {found.says.replace('|', '/')}"


if __name__ == "__main__":
    main()
