"""The rules that can be checked on the source text. Each takes the root of a tree and returns
findings as `file:line: what`."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TypeGuard

ARROWS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "": frozenset({"engine", "sampling"}),
        "core": frozenset(),
        "worker": frozenset({"core"}),
        "device": frozenset({"core", "worker"}),
        "config": frozenset({"core", "device"}),
        "checkpoint": frozenset({"core", "worker", "device"}),
        "sampling": frozenset({"core", "worker"}),
        "step": frozenset({"core", "worker", "config", "sampling"}),
        "schedule": frozenset({"core", "worker", "sampling", "step"}),
        "runtime": frozenset({"core", "worker", "device", "config", "checkpoint", "sampling", "step"}),
        "layers": frozenset({"core", "worker", "device", "checkpoint", "runtime"}),
        "models": frozenset({"core", "worker", "device", "config", "checkpoint", "runtime", "layers"}),
        "engine": frozenset({"core", "worker", "device", "config", "checkpoint", "sampling", "schedule"}),
        "serving": frozenset({"core", "worker", "device", "config", "sampling", "schedule", "engine"}),
        "bench": frozenset({"core", "sampling", "engine"}),
        "cli": frozenset(
            {"core", "worker", "device", "config", "sampling", "schedule", "engine", "serving", "conformance", "bench"}
        ),
        "conformance": frozenset(
            {
                "core",
                "worker",
                "device",
                "config",
                "checkpoint",
                "sampling",
                "schedule",
                "step",
                "runtime",
                "layers",
                "models",
                "engine",
                "serving",
            }
        ),
    }
)
"""What each part of `sglcore` may import, besides itself; "" is `sglcore/__init__.py`."""

DEVICE_ARROWS = frozenset({"core", "worker", "device", "config", "checkpoint", "models", "sampling", "step", "runtime"})
"""What a device package may import of the core."""
TORCH_PARTS = frozenset({"runtime", "layers"})
"""Parts that a device package may import only if it runs on torch. From the other parts, a package
without torch may not import files that load torch."""

ROOMS = ("replicas", "chat", "apis", "http")
"""The folders of `sglcore/serving`, lowest layer first: each may import itself and those before it.
Every file except `__init__.py` is in one of them."""

SIMULATOR, SIMULATED = "sglcore_sim", "simulated"
"""The simulator, and the folder of a device package that holds its simulated device: only that
folder may import the simulator."""

ANYWHERE = ("cuda", "rocm", "nvidia")
WHOLE = ("hip", "musa", "npu", "ascend", "mlx", "xpu", "amd")
_DEVICE_WORD = re.compile(f"({'|'.join(ANYWHERE)})|(?<![a-z])({'|'.join(WHOLE)})(?![a-z])")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
TEXT = frozenset({".py", ".pyi", ".json", ".html", ".toml", ".md", ".txt", ".cpp", ".h", ".css", ".js"})
MAKES_MUTABLE = frozenset({"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "bytearray"})
MAKES_THREADS = {"Thread": 1, "Timer": 1, "Process": 1}
"""The position of the function to run among the positional arguments of each class."""
FOREIGN = "# foreign:"
"""Ends a line that reads or sets an attribute on an object of another library, and says why."""

LONGEST_FILE, LONGEST_FUNCTION, MOST_FUNCTIONS = 350, 60, 20

MANY_FIELDS = 8
"""A record with this many fields or more has a docstring below each field."""
RECORD_MARKS = frozenset({"dataclass", "batch_record"})
"""Decorators that make a class a record."""
RECORD_BASES = frozenset({"Struct", "NamedTuple", "Protocol"})
"""Base classes that make a class a record."""
SAYS_ITSELF = "setting"
"""The call that declares a field with its help text; the help text documents the field."""


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed file, with the name that findings give it."""

    name: str
    lines: tuple[str, ...]
    tree: ast.Module

    def finding(self, node: ast.AST, what: str) -> str:
        """`file:line: what`."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {what}"

    def is_foreign(self, node: ast.AST) -> bool:
        """Whether the line says that the object belongs to another library."""
        return FOREIGN in self.lines[getattr(node, "lineno", 1) - 1]


def sources(root: Path, *patterns: str) -> Iterator[Source]:
    """The parsed Python files of the core and of the device packages, or of other patterns."""
    for pattern in patterns or ("sglcore/**/*.py", "devices/*/sglcore_*/**/*.py"):
        for path in sorted(root.glob(pattern)):
            text = path.read_text()
            yield Source(str(path.relative_to(root)), tuple(text.splitlines()), parsed(text))


parsed = cache(ast.parse)
"""Parse each text once for all rules. A caller that is done clears the cache to free the trees."""


def import_direction(root: Path) -> list[str]:
    """Find imports that `ARROWS` forbids, imports of a device package by the core, and imports of
    one device package by another."""
    found: list[str] = []
    for source in sources(root):
        parts = Path(source.name).parts
        for node, module in _imports(source):
            reason = _forbidden(parts, tuple(module.split(".")))
            if reason:
                found.append(source.finding(node, f"imports {module}: {reason}"))
    return found


def room_direction(root: Path) -> list[str]:
    """Find imports in the server from a room by a room below it, and server files outside every
    room."""
    found: list[str] = []
    for source in sources(root, "sglcore/serving/**/*.py"):
        room, *inside = Path(source.name).parts[2:]
        if (inside and room not in ROOMS) or (not inside and room != "__init__.py"):
            found.append(source.finding(source.tree, f"stands in none of the rooms {', '.join(ROOMS)}"))
            continue
        above = ROOMS[ROOMS.index(room) + 1 :] if inside else ROOMS
        for node, module in _imports(source):
            parts = module.split(".")
            if parts[:2] == ["sglcore", "serving"] and (len(parts) == 2 or parts[2] in above):
                found.append(source.finding(node, f"imports {module}: {room} imports only the rooms below it"))
    return found


def _imports(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Return every module that a file imports, at any nesting; `from sglcore import x` counts as
    `sglcore.x`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "sglcore" else [module]
            yield from ((node, "relative" if node.level else name) for name in names)


def _forbidden(importer: tuple[str, ...], imported: tuple[str, ...]) -> str:
    if imported[0] == "relative":
        return "relative imports hide the direction"
    if importer[0] == "devices":
        if imported[0] == SIMULATOR:
            return "" if SIMULATED in importer else f"only a package's {SIMULATED} imports the simulator"
        if imported[0].startswith("sglcore_") and imported[0] != importer[2]:
            return "device packages never import each other"
        is_core_part = imported[0] == "sglcore" and len(imported) > 1 and imported[1] in ARROWS
        return f"a device package imports only {_list(DEVICE_ARROWS)}" if is_core_part and not _ok(imported) else ""
    if imported[0].startswith("sglcore_"):
        return "the core never imports a device package"
    part = importer[1] if len(importer) > 2 else "cli" if "__main__.py" in importer else ""
    target = imported[1] if imported[0] == "sglcore" and len(imported) > 1 else part
    if target == part or target not in ARROWS or target in ARROWS.get(part, frozenset()):
        return ""
    return f"{part or 'sglcore'} imports only {_list(ARROWS.get(part, frozenset())) or 'itself'}"


def _ok(imported: tuple[str, ...]) -> bool:
    return imported[1] in DEVICE_ARROWS


def _list(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def without_torch(root: Path) -> dict[str, list[Source]]:
    """Return the files of each device package that has no file importing torch."""
    packages: dict[str, list[Source]] = {}
    for source in sources(root, "devices/*/sglcore_*/**/*.py"):
        packages.setdefault(Path(source.name).parts[1], []).append(source)
    return {name: files for name, files in packages.items() if not any(_loads_torch(source) for source in files)}


def core_modules(source: Source) -> list[tuple[ast.AST, str]]:
    """Return the modules of the core that a file imports, as `sglcore.part.module`."""
    return [(node, module) for node, module in _imports(source) if module.startswith("sglcore.")]


def _loads_torch(source: Source) -> bool:
    return any(module.split(".")[0] == "torch" for _, module in _imports(source))


def torch_parts(root: Path) -> list[str]:
    """Find imports of `TORCH_PARTS` by device packages without torch."""
    return [
        source.finding(node, f"imports {module}, and no file of this package imports torch")
        for files in without_torch(root).values()
        for source in files
        for node, module in core_modules(source)
        if module.split(".")[1] in TORCH_PARTS
    ]


def device_words(root: Path) -> list[str]:
    """Find words that name a device or its vendor, in any text file of the core except the alias
    table and asset folders."""
    found: list[str] = []
    for path in sorted((root / "sglcore").rglob("*")):
        name = path.relative_to(root)
        if path.suffix not in TEXT or "assets" in name.parts or name == Path("sglcore/cli/aliases.py"):
            continue
        lines = (str(name), *path.read_text().splitlines())
        for number, line in enumerate(lines):
            word = _DEVICE_WORD.search(_CAMEL.sub(" ", line).lower())
            if word:
                found.append(f"{name}:{number}: the device word {word.group()!r}")
    return found


def mutable_globals(root: Path) -> list[str]:
    """Find lists, dictionaries and sets at module or class level, and `global` statements."""
    found: list[str] = []
    for source in sources(root):
        bodies = [source.tree.body, *(n.body for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef))]
        for statement in (statement for body in bodies for statement in body):
            if _keeps_mutable(statement):
                found.append(source.finding(statement, "mutable state of the module or class"))
        changed = (node for node in ast.walk(source.tree) if isinstance(node, ast.Global))
        found += [source.finding(node, f"global {', '.join(node.names)}") for node in changed]
    return found


def _keeps_mutable(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return False
    return _is_mutable(statement.value) and not _names_only(statement, "__all__")


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    return isinstance(value, ast.Call) and _last_name(value.func) in MAKES_MUTABLE


def _names_only(statement: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return all(isinstance(target, ast.Name) and target.id == name for target in targets)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def guessed_attributes(root: Path) -> list[str]:
    """Find `hasattr`, and `getattr` with a default, on lines that are not marked `# foreign:`."""
    found: list[str] = []
    for source in sources(root):
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or source.is_foreign(node):
                continue
            if node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) > 2):
                found.append(source.finding(node, f"{node.func.id} guesses at an attribute"))
    return found


def thread_targets(root: Path) -> list[str]:
    """Find threads whose target does not accept the arguments it is given. No type checker sees
    this, and the thread would end without a report."""
    return [finding for source in sources(root) for finding in _wrong_targets(source, source.tree, None)]


def _wrong_targets(source: Source, node: ast.AST, owner: ast.ClassDef | None) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and _last_name(child.func) in MAKES_THREADS:
            why = _why_wrong(source, child, owner)
            if why:
                yield source.finding(child, why)
        yield from _wrong_targets(source, child, child if isinstance(child, ast.ClassDef) else owner)


def _why_wrong(source: Source, call: ast.Call, owner: ast.ClassDef | None) -> str:
    """Why the thread that a call makes would end at once; empty if it would not."""
    words = {word.arg: word.value for word in call.keywords}
    place = MAKES_THREADS[_last_name(call.func)]
    target = words.get("target", words.get("function", call.args[place] if len(call.args) > place else None))
    given = words.get("args", ast.Tuple(elts=[]))
    if target is None:
        return ""  # a subclass with its own `run`
    parameters = _parameters(source, target, owner)
    if parameters is None or not isinstance(given, ast.Tuple | ast.List) or "kwargs" in words:
        return "a thread's target and args have to be seen: a function of this file, and a tuple"
    known = [*parameters.posonlyargs, *parameters.args]
    most = len(known) - (isinstance(target, ast.Attribute))
    least, count = most - len(parameters.defaults), len(given.elts)
    if least <= count and (count <= most or parameters.vararg is not None):
        return ""
    return f"a thread's target takes {least} to {most} arguments and is given {count}"


def _parameters(source: Source, target: ast.expr, owner: ast.ClassDef | None) -> ast.arguments | None:
    """The parameters of a function of the file, of a method of the enclosing class, or of a
    lambda."""
    if isinstance(target, ast.Lambda):
        return target.args
    if isinstance(target, ast.Name):
        within, name = source.tree, target.id
    elif owner is not None and isinstance(target, ast.Attribute) and _root_name(target) == "self":
        within, name = owner, target.attr
    else:
        return None
    found = [each for each in ast.walk(within) if isinstance(each, ast.FunctionDef) and each.name == name]
    return found[0].args if len(found) == 1 else None


def monkey_patches(root: Path) -> list[str]:
    """Find assignments to attributes of imported objects."""
    return [finding for source in sources(root) for finding in _patches(source, source.tree, frozenset())]


def _patches(source: Source, scope: ast.AST, outer: frozenset[str]) -> Iterator[str]:
    """Find such assignments in one scope, where names that the scope binds itself hide imported
    ones."""
    here, inner = _scope_nodes(scope)
    bound = {node.id for node in here if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in here if isinstance(node, ast.arg)}
    bindings = (alias for node in here if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names)
    imported = (outer - bound) | {alias.asname or alias.name.split(".")[0] for alias in bindings}
    for node in here:
        if _root_name(_patched(node)) in imported and not source.is_foreign(node):
            yield source.finding(node, f"assigns to an attribute of the imported {_root_name(_patched(node))}")
    for scope_inside in inner:
        yield from _patches(source, scope_inside, frozenset(imported))


def _scope_nodes(scope: ast.AST) -> tuple[list[ast.AST], list[ast.AST]]:
    """The nodes that belong to a scope, and the function scopes inside it."""
    here: list[ast.AST] = []
    inner: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner.append(node)
            continue
        here.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return here, inner


def _patched(node: ast.AST) -> ast.expr | None:
    """The object on which a node sets or deletes an attribute."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        return node.value
    if isinstance(node, ast.Call) and _last_name(node.func) in ("setattr", "delattr") and node.args:
        return node.args[0]
    return None


def _root_name(node: ast.expr | None) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def budgets(root: Path) -> list[str]:
    """Find files and functions with too many lines of code, and report if too many functions are
    close to the limit. Docstrings and comments do not count."""
    found: list[str] = []
    lengths: list[int] = []
    for source in sources(root):
        code = code_lines(source)
        if len(code) > LONGEST_FILE:
            found.append(f"{source.name}:1: {len(code)} lines of code, where {LONGEST_FILE} are the most")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = bisect_right(code, node.end_lineno or node.lineno) - bisect_left(code, node.lineno)
                lengths.append(length)
                if length > LONGEST_FUNCTION:
                    what = f"{node.name} has {length} lines of code, at most {LONGEST_FUNCTION}"
                    found.append(source.finding(node, what))
    nearly = sorted(lengths)[int(len(lengths) * 0.9)] if lengths else 0
    if nearly >= MOST_FUNCTIONS:
        what = f"{nearly} lines of code or more, where it should be fewer than {MOST_FUNCTIONS}"
        found.append(f"one function in ten has {what}")
    return found


def code_lines(source: Source) -> list[int]:
    """Return the numbers of the lines that are not blank, docstring or comment, ascending."""
    text = {
        number
        for node in ast.walk(source.tree)
        if isinstance(node, ast.stmt) and _is_text(node)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(map(str.strip, source.lines), 1)
    return [number for number, line in lines if line and not line.startswith("#") and number not in text]


def fields_without_docstring(root: Path) -> list[str]:
    """Find records with at least `MANY_FIELDS` fields, where some field has no docstring below it.

    A record is a dataclass, a batch record, a msgspec.Struct (also through a base class), a
    NamedTuple or a Protocol. A field declared with `setting` is documented by its help text. Models
    of request bodies (pydantic) are not records: their fields belong to other APIs.
    """
    found: list[str] = []
    structs = _structs(root)
    for source in sources(root):
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ClassDef) or not _is_record(node, structs):
                continue
            fields = [(each, after) for each, after in pairwise((*node.body, None)) if _is_field(each)]
            bare = [_last_name(each.target) for each, after in fields if not _is_documented(each, after)]
            if bare and len(fields) >= MANY_FIELDS:
                found.append(source.finding(node, f"{node.name} has no docstring below {', '.join(bare)}"))
    return found


def _structs(root: Path) -> frozenset[str]:
    """The names of the tree's classes that derive from `RECORD_BASES`, directly or indirectly."""
    bases = {
        node.name: {_base_name(base) for base in node.bases}
        for source in sources(root)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }
    known = set(RECORD_BASES)
    while more := {name for name, of in bases.items() if of & known} - known:
        known |= more
    return frozenset(known)


def _is_record(node: ast.ClassDef, structs: frozenset[str]) -> bool:
    marks = {_last_name(mark.func if isinstance(mark, ast.Call) else mark) for mark in node.decorator_list}
    return bool(marks & RECORD_MARKS) or any(_base_name(base) in structs for base in node.bases)


def _base_name(base: ast.expr) -> str:
    return _last_name(base.value if isinstance(base, ast.Subscript) else base)


def _is_field(node: ast.stmt | None) -> TypeGuard[ast.AnnAssign]:
    return isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)


def _is_documented(field: ast.AnnAssign, after: ast.stmt | None) -> bool:
    declares = isinstance(field.value, ast.Call) and _last_name(field.value.func) == SAYS_ITSELF
    return declares or _is_text(after)


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def undocumented(root: Path) -> list[str]:
    """Find modules, public classes and functions without a docstring, and methods that can not
    inherit one."""
    found: list[str] = []
    for source in sources(root):
        if source.tree.body and ast.get_docstring(source.tree) is None:
            found.append(source.finding(source.tree, "the module has no docstring"))
        for node in _public(source.tree.body):
            if ast.get_docstring(node) is None:
                found.append(source.finding(node, f"{node.name} has no docstring"))
            if isinstance(node, ast.ClassDef) and not _may_inherit(node):
                bare = (method for method in _public(node.body) if ast.get_docstring(method) is None)
                found += [source.finding(method, f"{node.name}.{method.name} has no docstring") for method in bare]
    return found


def _public(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            marks = {_last_name(mark.func if isinstance(mark, ast.Call) else mark) for mark in node.decorator_list}
            if not marks & {"overload", "setter", "override"}:
                yield node


def _may_inherit(node: ast.ClassDef) -> bool:
    """Whether methods of a class may inherit docstrings from a base class of ours or of another
    library."""
    bases = {_base_name(base) for base in node.bases}
    return bool(bases - {"Protocol", "Generic", "ABC", "NamedTuple", "Enum", "IntEnum", "StrEnum"})
