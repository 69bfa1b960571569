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
    """Return the parameters of a module's top-level functions and of its classes' methods, private
    ones included, by name ("Class.method" for a method). `text` is the source; nothing is imported.
    A later definition of the same name replaces the earlier one."""
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
    """Return the parameters of a Python function in the form of `Parameters`, with the default's
    repr as text. The kinds are positional, rest (*args), named (keyword only) and others
    (**kwargs)."""
    kinds = {"POSITIONAL_ONLY": "positional", "POSITIONAL_OR_KEYWORD": "positional", "VAR_POSITIONAL": "rest"}
    kinds |= {"KEYWORD_ONLY": "named", "VAR_KEYWORD": "others"}
    rows = inspect.signature(function).parameters.values()
    return [[kinds[row.kind.name], row.name, "" if row.default is row.empty else repr(row.default)] for row in rows]


def of_face(names: Mapping[str, Any]) -> Iterator[tuple[str, Parameters]]:
    """Yield name and parameters of the public functions in `names` (a module's names), and of the
    public methods and constructors of its classes, as "Class.method". Only Python functions that a
    class or a base of this package defines count; what torch's bases define does not."""
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
    """Return "version" (from the file's name) and "signatures" of a torch_npu wheel: the parameters
    of the functions and methods in the modules SOURCES of `torch_npu.npu`, sorted by name, without
    names that begin with "_"."""
    found: dict[str, Parameters] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in SOURCES:
            found |= of_source(archive.read(f"torch_npu/npu/{name}.py").decode())
    public = {name: rows for name, rows in found.items() if not name.startswith("_")}
    return {"version": wheel.name.split("-")[1], "signatures": dict(sorted(public.items()))}


def schemas_of_wheel(wheel: Path, names: Iterable[str]) -> list[str]:
    """Return the schemas of the operators `names` (without namespace, with overload), sorted by
    name, each as "npu::name(...) -> ...". They are found as text in the shared libraries of a
    torch_npu wheel. Raises KeyError for an operator that is not found."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".so"))
    texts = (text.decode() for text in re.findall(rb"[ -~]{16,}", libraries) if b") -> " in text)
    found = {text.partition("(")[0]: f"npu::{text}" for text in texts}
    return [found[name] for name in sorted(names)]


def stored(name: str) -> dict[str, Any]:
    """Load the stored data of a vendor's module, such as "torch_npu": the list "versions" that were
    read, and "signatures", their common parameters by name."""
    return json.loads((STORED / f"{name}_signatures.json").read_text())


def write(wheels: Sequence[Path]) -> None:
    """Write the signatures and the schemas of these torch_npu wheels, the newest last, to the
    package's data folder: signatures from all of them, schemas of the operators with a reference
    from the last. Raises ValueError, with the differences, if their signatures differ; then nothing
    is written."""
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
