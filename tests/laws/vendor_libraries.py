"""No vendor's library can end a start: each name that a package uses is taken away and made to
fail, one at a time.

A package's test file says which modules of the package call which library, and has `from
tests.laws.vendor_libraries import *` for the fixture.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest

from sglcore.engine.llm import LLM
from sglcore.sampling.params import SamplingParams
from tests.laws import half

__all__ = ["model"]

SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "dtype": "float16",
        "kernels": "reference",
        "kv_cache_memory": 4 << 20,
        "max_requests": 2,
        "graph_buckets": (1,),
        "max_batch_tokens": 64,
        "skip_tokenizer": True,
    }
)
"""Settings of a start that captures one graph, of kernels that simulated devices run fast."""


@dataclass(frozen=True)
class Library:
    """A library of a vendor: its module, by name, and the modules of the package that call it."""

    name: str
    users: tuple[str, ...]

    @property
    def module(self) -> ModuleType:
        """The imported library, or the simulator's stand-in."""
        return importlib.import_module(self.name)

    def names(self) -> list[str]:
        """Return the names that the users read from the library, in order of appearance."""
        found = dict[str, None]()
        for user in self.users:
            spec = find_spec(user)
            assert spec is not None and spec.origin is not None
            tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == self.name:
                    found[node.attr] = None
        return list(found)

    def imported_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the users import the library again at the next start."""
        for user in self.users:
            monkeypatch.delitem(sys.modules, user, raising=False)


class Failing:
    """Stands in for a function or a class of a library: calling it fails, as does reading it."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        raise RuntimeError("no kernel image is available for execution on the device")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"it has no {name}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with heads that every library takes."""
    return half.checkpoint(tmp_path_factory.mktemp("model"))[1]


def spoken(model: Path, device: str, **settings: Any) -> tuple[Sequence[int], str]:
    """Return the tokens of a greedy answer, and the ledger's rows as text."""
    with LLM(str(model), device=device, **{**SMALL, **settings}) as engine:
        told = "\n".join(f"{row.topic}: {row.effective}: {row.reason}" for row in engine.ledger.rows)
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    return output.outputs[0].token_ids, told


def attention_of(told: str) -> str:
    """Return the backend that the ledger's first row on attention names."""
    (row, *_) = (line for line in told.splitlines() if line.startswith("attention: "))
    return row.split(": ")[1]


def cases(libraries: Iterable[Library]) -> list[Any]:
    """Return a parameter (library, name, how it fails) for each name."""
    return [
        pytest.param(library, name, how, id=f"{library.name}.{name}-{how}")
        for library in libraries
        for name in library.names()
        for how in ("missing", "failing")
    ]


def break_name(monkeypatch: pytest.MonkeyPatch, library: Library, name: str, how: str) -> None:
    """Take a name away from the library, or make it fail, for the next start."""
    library.imported_anew(monkeypatch)
    if how == "missing":
        monkeypatch.delattr(library.module, name)
    else:
        monkeypatch.setattr(library.module, name, Failing())
