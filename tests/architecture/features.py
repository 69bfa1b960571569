"""The rule that optional features are leaves: nothing that every request passes imports one."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.architecture.rules import Source, sources

FEATURES = (
    "engine/disaggregation/",
    "engine/layouts/",
    "engine/ranks/",
    "engine/structured_output/",
    "layers/parallel/",
    "models/drafts/",
    "models/transformers_backend/",
    "runtime/hisparse/",
    "runtime/overlap/",
    "runtime/parallel/",
    "runtime/pooling.py",
    "runtime/speculative/",
    "schedule/data_parallel/",
    "schedule/disaggregation/",
    "schedule/layered_prefill/",
)
"""Folders and files of `sglcore` that a start without the feature does not need."""

COMPOSERS = frozenset(
    {
        "engine/core.py",
        "engine/start.py",
        "engine/token_engine.py",
        "models/checkpoint.py",
        "models/implementation.py",
        "models/weights/model_loader.py",
        "runtime/bring_up.py",
        "runtime/memory/memory_bring_up.py",
        "schedule/make_loop.py",
    }
)
"""Files that put an engine together once, of the features that were asked for."""

ABOVE = ("cli/", "conformance/", "serving/", "bench/", "__main__.py")
"""Programs, which use the engine as a whole."""


def features_in_the_trunk(root: Path) -> list[str]:
    """Find imports of an optional feature by a module that is neither a feature, nor a composer,
    nor a program. Imports for types and inside functions count: a reader follows them too."""
    return [
        f"{source.name}:{line}: imports {module}, an optional feature"
        for source in sources(root)
        if source.name.startswith("sglcore/") and _is_trunk(_inside(source.name))
        for line, module in _imported(source)
        if _is_feature(module)
    ]


def idle_composers(root: Path) -> list[str]:
    """Return the composers that import no feature."""
    busy = {
        _inside(source.name)
        for source in sources(root)
        if source.name.startswith("sglcore/") and any(_is_feature(module) for _, module in _imported(source))
    }
    return sorted(COMPOSERS - busy)


def _inside(name: str) -> str:
    return name.removeprefix("sglcore/")


def _is_trunk(name: str) -> bool:
    return not name.startswith((*FEATURES, *ABOVE)) and name not in COMPOSERS


def _is_feature(module: str) -> bool:
    path = _inside(module.replace(".", "/"))
    return module.startswith("sglcore.") and any(
        path == feature.removesuffix(".py") or f"{path}/".startswith(feature) for feature in FEATURES
    )


def _imported(source: Source) -> list[tuple[int, str]]:
    """Return the imported modules with their lines; `from package import name` gives the name's
    module too, in case it is one."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            of_node = {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
            found += [(node.lineno, module) for module in sorted(of_node) if _is_feature(module)][:1]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, each.name) for each in node.names]
    return found
