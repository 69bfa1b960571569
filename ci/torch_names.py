"""Public names of the oldest and the newest supported torch, which are not installed here: they are
stored, and a test compares the names that the code uses with them. `python -m ci.torch_names WHEEL`
writes the list of a version from a wheel of any platform.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ci.lanes import ROOT

FOLDER = Path(__file__).parent / "data"
CODE = ("sglcore/**/*.py", "devices/*/sglcore_*/**/*.py")
STUBS = ("torch/_C/__init__.pyi", "torch/_C/_VariableFunctions.pyi", "torch/_C/_acc/__init__.pyi")
CLASSES = ("Tensor", "Stream", "Event")
"""Classes that have their members stored too."""


def stored_versions() -> dict[str, dict[str, list[str]]]:
    """Read the stored results of `names_of_wheel`, by torch version, oldest first."""
    texts = [json.loads(file.read_text()) for file in FOLDER.glob("torch_names_*.json")]
    found = {names["version"][0]: names for names in texts}
    return dict(sorted(found.items(), key=lambda item: [int(part) for part in item[0].split(".")]))


def names_of_wheel(wheel: Path) -> dict[str, list[str]]:
    """Return, from a wheel, the names in each torch module that has public Python source, the
    members of `CLASSES`, and the version as `version`."""
    with zipfile.ZipFile(wheel) as files:
        sources = {name: files.read(name).decode() for name in files.namelist() if _wanted(name)}
        version = (
            next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
            .split("-")[1]
            .removesuffix(".dist")
        )
    trees = {name: ast.parse(text) for name, text in sources.items()}
    found: dict[str, set[str]] = {}
    for name, tree in trees.items():
        module = "torch" if name in STUBS else name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found.setdefault(module, set()).update(_defined(tree))
    for module in list(found):
        parent, _, child = module.rpartition(".")
        found.get(parent, set()).add(child)
    found["torch"] |= found["torch.functional"]  # torch takes all of them in with a star
    for kind in CLASSES:
        found[f"torch.{kind}"] = {name for tree in trees.values() for name in _members(tree, kind)}
    return {"version": [version], **{module: sorted(names) for module, names in sorted(found.items()) if names}}


def _wanted(name: str) -> bool:
    """Return whether to read a file: public modules down to the third level, the stubs, and the
    files with the Python parts of `CLASSES`."""
    if name in STUBS or name in ("torch/_tensor.py", "torch/_streambase.py"):
        return True
    parts = Path(name).with_suffix("").parts
    public = not any(part.startswith("_") and part != "__init__" for part in parts)
    skipped = {"testing", "onnx", "jit", "package", "ao", "quantization", "utils", "masked", "profiler", "export"}
    return name.startswith("torch/") and name.endswith(".py") and public and len(parts) <= 4 and not skipped & {*parts}


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module binds at its top level, in any branch."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
            if node.value is not None and "__all__" in ast.dump(targets[0]):
                yield from (str(x.value) for x in ast.walk(node.value) if isinstance(x, ast.Constant))
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _defined(node)


def _members(tree: ast.AST, kind: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in (kind, f"{kind}Base", f"_{kind}Base"):
            yield from _defined(node)


def unknown_names(stored: Mapping[str, list[str]], root: Path = ROOT) -> list[str]:
    """Return `file:line: name` of each torch name in the code that the stored version lacks."""
    modules = {module: frozenset(names) for module, names in stored.items() if module != "version"}
    missing = _missing_members(modules)
    found = []
    for pattern in CODE:
        for path in sorted(root.glob(pattern)):
            for line, name in _uses(ast.parse(path.read_text()), missing):
                if _is_unknown(name, modules):
                    found.append(f"{path.relative_to(root)}:{line}: {name}")
    return found


def _missing_members(modules: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return methods of the installed torch's classes that the stored version lacks (not yet added,
    or removed). Any use of such a name counts as torch's: no object of ours has it."""
    import torch

    kinds = (torch.Tensor, torch.Stream, torch.Event)
    known = frozenset().union(*(modules[f"torch.{kind}"] for kind in CLASSES))
    members = ((kind, name) for kind in kinds for name in dir(kind) if not name.startswith("_"))
    return frozenset(name for kind, name in members if callable(getattr(kind, name))) - known


def _uses(tree: ast.AST, missing: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of dotted names that start at torch, in expressions and imports, and of
    the members in `missing`."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = (alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names)
    start = "torch." if any(name.split(".")[0] == "torch" for name in imported) else "no name of torch is bound here"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.Attribute):
            dotted = _dotted(node)
            if dotted.startswith(start) and id(node) not in inner:
                yield node.lineno, dotted
            elif node.attr in missing and not dotted.startswith("torch."):
                yield node.lineno, f"torch.Tensor.{node.attr}"


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


def _is_unknown(name: str, modules: Mapping[str, frozenset[str]]) -> bool:
    """Return whether a name is unknown: find its longest prefix that is a known module or class;
    the next part must be a name in it. Registered operators (torch.ops) are always known."""
    parts = name.split(".")
    if parts[:2] == ["torch", "ops"]:
        return False
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        if module in modules:
            return parts[end] not in modules[module]
    return len(parts) > 1


if __name__ == "__main__":
    made = names_of_wheel(Path(sys.argv[1]))
    file = FOLDER / f"torch_names_{made['version'][0]}.json"
    file.write_text(json.dumps(made, indent=0).replace('",\n"', '", "') + "\n")
    print(f"{file.name}: {sum(map(len, made.values()))} names")
