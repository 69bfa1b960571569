"""Compares every causal language model type of the installed transformers, as a tiny random model:
its own forward against this engine.

    python tools/sweep_models.py  # all types: a line each, and build/sweep/models.json
    python tools/sweep_models.py gemma2 gpt_oss     # some
    python tools/sweep_models.py --write  # all, then docs/models.md and the proven types

It compares log-probabilities in float32: a prompt in random chunks batched with another request,
then ragged decode steps of both; then requests through the scheduler, with prefix hits and
preemption. Each type runs in a child process with limited memory and time. Needs a machine without
a device.

Configuration and class give the group of a type: a wrapper's configuration contains other models'
configurations; a decoder of an encoder declares it or has cross attention; an encoder is a masked
language model, or is not causal. All others are text decoders.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from sglcore.core.errors import SglcoreError  # noqa: E402
from tests.models.transformers_cases import compare, compare_served, sizes_of, tiny_model  # noqa: E402

EQUAL = 2e-4
"""The largest difference of log-probabilities that counts as equal."""
SMALL = 3_000_000
"""The most parameters of a tiny model; with more, the configuration was not shrunk."""
SECONDS, BYTES = 90, 6 << 30
TYPES = ROOT / "sglcore" / "models" / "transformers_backend" / "verified_types.py"
PAGE = ROOT / "docs" / "models.md"
DECODER = "text decoder"
BEGIN, END = "<!-- written by tools/sweep_models.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Verdict:
    """The result of one type: equal, differs, refused (with the engine's message) or failed (before
    any comparison)."""

    kind: str
    verdict: str
    error: float | None = None
    says: str = ""
    group: str = DECODER


def sweep_one(kind: str, sizes: dict[str, Any]) -> Verdict:
    """Compare one type."""
    group = _declared(kind)
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes))
        if any("encoder_attn" in name for name, _ in empty.named_modules()):
            group = "decoder of an encoder"
        count = sum(each.numel() for each in empty.parameters())
        if count > SMALL:
            return Verdict(kind, "failed", None, f"{count} parameters: the configuration is not shrunk", group)
        model = tiny_model(kind, sizes)
        if group == DECODER and not _is_causal(model):
            group = "encoder"
    except Exception as error:
        return Verdict(kind, "failed", None, _line(error), group)
    return Verdict(kind, *_compared(model), group)


def _declared(kind: str) -> str:
    """Return the group of a type by its configuration only."""
    made = CONFIG_MAPPING[kind]
    if any(getattr(each, "model_type", "any") for each in cast("Mapping[str, Any]", made.sub_configs).values()):
        return "wrapper"
    if made().is_encoder_decoder:
        return "decoder of an encoder"
    return "encoder" if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES else DECODER


def _is_causal(model: PreTrainedModel) -> bool:
    """Return whether logits do not depend on later tokens."""
    tokens = torch.tensor([[5, 7, 9, 11, 13], [5, 7, 9, 11, 17]])
    with torch.no_grad():
        first, second = model(tokens, use_cache=False).logits[:, :4]
    return torch.allclose(first, second, atol=1e-4)


def _compared(model: PreTrainedModel) -> tuple[str, float | None, str]:
    """Return the verdict, the largest difference, and the error message."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            error = max(compare(model, Path(folder)), compare_served(model, Path(folder)))
        except SglcoreError as refusal:
            return "refused", None, _line(refusal).replace(f"{folder}/", "")
        except Exception as error:
            return "failed", None, _line(error)
    return ("equal" if error <= EQUAL else "differs"), error, ""


def _line(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return (
        text
        if isinstance(error, SglcoreError)
        else f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
    )


def in_child(kind: str, sizes: dict[str, Any]) -> Verdict:
    """Run `sweep_one` in a child process with limits on memory and time. Waits."""
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
    if said:
        return Verdict(**json.loads(said))
    return Verdict(kind, "failed", None, f"the process ended with status {status}", _declared(kind))


def main() -> None:
    """Compare all types, print, and with `--write` write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = options.types or [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING]
    verdicts: list[Verdict] = []
    for kind in kinds:
        verdicts.append(in_child(kind, sizes_of(kind)))
        found = verdicts[-1]
        print(kind, found.verdict, "" if found.error is None else f"{found.error:.2g}", found.says, flush=True)
    print(_counts(verdicts))
    out = ROOT / "build" / "sweep" / "models.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    told = {"transformers": transformers.__version__, "types": [asdict(each) for each in verdicts]}
    out.write_text(json.dumps(told, indent=1))
    if options.write:
        if options.types:
            parser.error("--write takes all types")
        write(verdicts)


def _counts(verdicts: Sequence[Verdict]) -> str:
    decoders = [each.verdict for each in verdicts if each.group == DECODER]
    equal = [each.verdict for each in verdicts].count("equal")
    return (
        f"{decoders.count('equal')} of {len(decoders)} text decoders and {equal} of {len(verdicts)} types of "
        f"transformers {transformers.__version__} are equal"
    )


def write(verdicts: Sequence[Verdict]) -> None:
    """Write the list of proven types, and the table of docs/models.md."""
    equal = sorted((each.kind, each.error or 0.0) for each in verdicts if each.verdict == "equal")
    names = "".join(f'        "{kind}",\n' for kind, _ in equal)
    head = TYPES.read_text().partition("VERSION = ")[0]
    version = f'VERSION = "{transformers.__version__}"\n"""The transformers that was compared."""\n\n'
    TYPES.write_text(f"{head}{version}PROVEN: frozenset[str] = frozenset(\n    {{\n{names}    }}\n)\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    rows = [f"| `{kind}` | {error:.1e} |" for kind, error in equal]
    table = "\n".join(["| type | greatest difference |", "|---|---|", *rows])
    others = sorted((each for each in verdicts if each.verdict != "equal"), key=lambda each: each.group != DECODER)
    refused = [f"| `{each.kind}` | {each.group} | {_why(each)} |" for each in others]
    table += "\n\n" + "\n".join(["| not served | what it is | why |", "|---|---|---|", *refused])
    PAGE.write_text(f"{before}{BEGIN}\n\n{_counts(verdicts)}.\n\n{table}\n\n{END}{rest.partition(END)[2]}")


def _why(found: Verdict) -> str:
    """Return the reason as a table cell."""
    if found.verdict == "differs":
        return f"its log-probabilities differ by {found.error:.2g}"
    what = {"refused": "refused", "failed": "not compared"}[found.verdict]
    return f"{what}: {found.says.replace('|', '/')}"


if __name__ == "__main__":
    main()
