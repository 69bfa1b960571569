"""Signatures of a vendor's Python sources, read without importing them, and signatures of a face,
in the same format.

`python -m sglcore_sim.signatures WHEEL...` writes the stored data of torch_npu: the signatures of
its module, which must be equal in all these wheels, and, from the last wheel, the schemas of the
operators that sglcore calls.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

Parameters = list[list[str]]
"""Kind, name and default of every parameter; the default as source text ("" without one)."""
SOURCES = ("__init__", "graphs", "memory", "random", "streams", "utils")
STORED = Path(str(files("sglcore_sim"))) / "data"


def of_source(text: str) -> dict[str, Parameters]:
    """Return the parameters of the functions and methods ("Class.method") of a module's source."""
    found: dict[str, Parameters] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _of_arguments(node.args)
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": _of_arguments(method.args) for method in methods}
    return found


def _of_arguments(arguments: ast.arguments) -> Parameters:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    rows = [["positional", a.arg, _source(d)] for a, d in zip(plain, defaults, strict=True)]
    rows += [["rest", arguments.vararg.arg, ""]] if arguments.vararg else []
    rows += [["named", a.arg, _source(d)] for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return rows + ([["others", arguments.kwarg.arg, ""]] if arguments.kwarg else [])


def _source(default: ast.expr | None) -> str:
    return "" if default is None else ast.unparse(default)


def of_callable(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a Python function."""
    kinds = {"POSITIONAL_ONLY": "positional", "POSITIONAL_OR_KEYWORD": "positional", "VAR_POSITIONAL": "rest"}
    kinds |= {"KEYWORD_ONLY": "named", "VAR_KEYWORD": "others"}
    rows = inspect.signature(function).parameters.values()
    return [[kinds[row.kind.name], row.name, "" if row.default is row.empty else repr(row.default)] for row in rows]


def of_face(names: Mapping[str, Any]) -> Iterator[tuple[str, Parameters]]:
    """Yield the names and parameters of a face's public functions, and of the public methods and
    constructors of its public classes."""
    for name, value in names.items():
        if name.startswith("_") or not callable(value):
            continue
        if not inspect.isclass(value):
            yield name, of_callable(value)
            continue
        ours = [vars(base) for base in value.__mro__ if base.__module__.startswith(__package__ or "")]
        for method, function in {name: f for own in reversed(ours) for name, f in own.items()}.items():
            if inspect.isfunction(function) and (not method.startswith("_") or method in ("__new__", "__init__")):
                yield f"{name}.{method}", of_callable(function)


def of_wheel(wheel: Path) -> dict[str, Any]:
    """Return the version of a torch_npu wheel and the signatures of its `torch_npu.npu`."""
    found: dict[str, Parameters] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in SOURCES:
            found |= of_source(archive.read(f"torch_npu/npu/{name}.py").decode())
    public = {name: rows for name, rows in found.items() if not name.startswith("_")}
    return {"version": wheel.name.split("-")[1], "signatures": dict(sorted(public.items()))}


def schemas_of_wheel(wheel: Path, names: Iterable[str]) -> list[str]:
    """Return the schemas of operators of the namespace `npu`, one line each, from the text in the
    shared libraries of a torch_npu wheel."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".so"))
    texts = (text.decode() for text in re.findall(rb"[ -~]{16,}", libraries) if b") -> " in text)
    found = {text.partition("(")[0]: f"npu::{text}" for text in texts}
    return [found[name] for name in sorted(names)]


def stored(name: str) -> dict[str, Any]:
    """Load the stored data of a vendor's module: the "versions" that were read, and their common
    "signatures"."""
    return json.loads((STORED / f"{name}_signatures.json").read_text())


def write(wheels: Sequence[Path]) -> None:
    """Store signatures and schemas of these torch_npu wheels, the newest last. Raises ValueError if
    their signatures differ."""
    from sglcore_sim.vendors.torch_npu import REFERENCES

    read = [of_wheel(wheel) for wheel in wheels]
    first = read[0]["signatures"]
    for other in read[1:]:
        if differing := sorted(
            str(row) for row in {*map(str, first.items())} ^ {*map(str, other["signatures"].items())}
        ):
            raise ValueError(f"{read[0]['version']} and {other['version']} differ: {', '.join(differing)}")
    text = json.dumps({"versions": [one["version"] for one in read], "signatures": first}, separators=(",", ":"))
    (STORED / "torch_npu_signatures.json").write_text(text.replace('],"', '],\n"') + "\n")
    lines = schemas_of_wheel(wheels[-1], REFERENCES)
    (STORED / f"npu_called_{read[-1]['version']}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write([Path(wheel) for wheel in sys.argv[1:]])
