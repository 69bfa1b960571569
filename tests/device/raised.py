"""A copy of the core with the contract's number raised by one and with samples of changes that a
raise may bring."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEW_FIELD = '''    title: str
    """One line for people: what it runs on."""
    reset: Ref
    """`reset(index: int)`: frees a device that an error left unusable."""
'''
NEW_METHOD = '''
    @abstractmethod
    def scratch_bytes(self) -> int:
        """Bytes that it keeps beside the cells."""
'''
OWN_METHOD = '''
    def scratch_bytes(self) -> int:
        """None."""
        return 0
'''
ADAPTER = '''

def from_3(given: Keywords) -> Keywords:
    """Number 4 has `title` for `summary`, needs `reset`, gives the facts to kernel tables, and backends tell what they keep."""
    kept = {name: value for name, value in given.items() if name != "summary"}
    here = "sglcore.device.adapter"
    kernels = {name: wrapped(ref, f"{here}:kernels_from_3") for name, ref in given["kernels"].items()}
    attention = {name: wrapped(ref, f"{here}:attention_from_3") for name, ref in given["attention"].items()}
    return {
        **kept,
        "title": given["summary"],
        "reset": f"{here}:nothing_to_reset",
        "kernels": kernels,
        "attention": attention,
    }


def kernels_from_3(kernels: Callable[[], Any]) -> Callable[[Any], Any]:
    """Number 3 is not given the facts."""
    return lambda facts: kernels()


def attention_from_3(kind: type) -> type:
    """Number 3 keeps nothing, as far as it can tell."""
    own = {"scratch_bytes": lambda self: 0, "__module__": kind.__module__}
    return type(kind)(kind.__name__, (kind,), own) if isabstract(kind) else kind


def nothing_to_reset(index: int) -> None:
    """Number 3 can not."""


ADAPTERS = MappingProxyType({3: from_3})
'''


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one file: each match of a pattern is replaced by a text. Another number of
    matches than `count` is an error."""

    file: str
    pattern: str
    text: str
    count: int = 1


ADAPTERS = re.escape("ADAPTERS: Mapping[int, Callable[[Keywords], Keywords]] = MappingProxyType({})\n")
FACTS_OF_TABLE = (
    Edit("runtime/bring_up.py", r"(resolve\(package\.kernels\[.*\], package\.name\))\(\)", r"\1(facts)", 2),
    Edit("conformance/target.py", r"(self\.package\.kernels\[name\], self\.name\))\(\)", r"\1(self.facts())"),
    Edit("conformance/laws/laws_package.py", r"_callable_with\(ref, 0\)", "_callable_with(ref, 1)"),
)
BACKENDS = ("reference", "windowed", "sparse/latent", "sparse/compressed", "triton", "page_rows")
METHODS = (
    Edit("runtime/attention/contract.py", r"(?=\n    def encode\()", NEW_METHOD),
    *(
        Edit(
            f"runtime/attention/{name}.py",
            r'(class \w+\(AttentionBackend\[\w+\]\):\n    """(?:.|\n)*?"""\n)',
            rf"\1{OWN_METHOD}",
        )
        for name in BACKENDS
    ),
)
RAISE = (
    Edit("device/package.py", r"^API = 3$", "API = 4"),
    Edit("device/package.py", r'    summary: str\n    """.*"""\n', NEW_FIELD),
    Edit("device/package.py", r"self\.worker, \*named", "self.worker, self.reset, *named"),
    Edit("cli/device_report.py", r"package\.summary", "package.title"),
    Edit("device/adapter.py", rf"{ADAPTERS}(?:.*\n)*?(?=\ndef adapted)", ADAPTER),
    Edit("device/adapter.py", r"^from types import", "from inspect import isabstract\nfrom types import"),
    Edit("device/adapter.py", r"^(Keywords: TypeAlias)", r"from sglcore.device.import_references import wrapped\n\n\1"),
    *FACTS_OF_TABLE,
    *METHODS,
)
"""A new required field, a renamed field, a new parameter of a function and a new method of a class.
The adapter fills in each."""
WITHOUT_ADAPTER = (Edit("device/adapter.py", r"MappingProxyType\(\{3: from_3\}\)", "MappingProxyType({})"),)
WITHOUT_WRAPPERS = (Edit("device/adapter.py", r"wrapped\((ref), .*?\)(?= for)", r"\1", 2),)
"""Defects of the adapter."""


def copy_core(folder: Path) -> None:
    """Copy `sglcore` there; its assets, which hold models, are linked."""
    ignored = shutil.ignore_patterns("assets")
    shutil.copytree(ROOT / "sglcore", folder / "sglcore", ignore=ignored)
    (folder / "sglcore" / "assets").symlink_to(ROOT / "sglcore" / "assets")


def edited(core: Path, *edits: Edit) -> dict[str, str]:
    """Return the changed files of a core by name. Raises AssertionError if a file no longer matches
    an edit."""
    made: dict[str, str] = {}
    for each in edits:
        text = made.get(each.file) or (core / each.file).read_text(encoding="utf-8")
        made[each.file], count = re.subn(each.pattern, each.text, text, flags=re.MULTILINE)
        assert count == each.count, f"{each.pattern!r} was found {count} times in {each.file}, wanted {each.count}"
    return made


def edit(folder: Path, *edits: Edit) -> None:
    """Change the copy in a folder."""
    for name, text in edited(folder / "sglcore", *edits).items():
        (folder / "sglcore" / name).write_text(text, encoding="utf-8")
