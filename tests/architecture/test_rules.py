"""The tree keeps every rule, and every rule finds the violation planted against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.loop_names import taken_names

ROOT = Path(__file__).resolve().parents[2]
ALL = (
    rules.import_direction,
    rules.room_direction,
    rules.torch_parts,
    rules.device_words,
    rules.mutable_globals,
    rules.guessed_attributes,
    rules.thread_targets,
    rules.monkey_patches,
    rules.budgets,
    rules.undocumented,
    rules.fields_without_docstring,
    taken_names,
)
Rule = Callable[[Path], list[str]]

LONG_FUNCTION = "def work():\n" + "    pass\n" * 61 + "".join(f"def short{n}(): ...\n" for n in range(20))
NEARLY_LONG = "\n".join(f"def work{n}():\n" + "    pass\n" * 35 for n in range(3))

FIELDS = '    a: int\n    """Doc."""\n' * 7
RECORD = f"@dataclass(slots=True)\nclass A:\n{FIELDS}"
STRUCTS = f"class A(msgspec.Struct): ...\nclass B(A):\n{FIELDS}"
DOCSTRINGS = f"class A:\n{FIELDS}" + "pass\n" * 330

MUTANTS: tuple[tuple[Rule, str, str], ...] = (
    (rules.import_direction, "sglcore/device/x.py", "from sglcore.runtime.y import z"),
    (rules.import_direction, "sglcore/device/x.py", "def later():\n    import sglcore.schedule"),
    (rules.import_direction, "sglcore/schedule/x.py", "from sglcore import runtime"),
    (rules.import_direction, "sglcore/runtime/x.py", "from sglcore.models.y import z"),
    (rules.import_direction, "sglcore/sampling/x.py", "from sglcore.runtime.y import z"),
    (rules.import_direction, "sglcore/engine/x.py", "from sglcore.cli.y import z"),
    (rules.import_direction, "sglcore/engine/x.py", "from sglcore_cpu import package"),
    (rules.import_direction, "sglcore/runtime/x.py", "from ..device import package"),
    (rules.import_direction, "devices/one/sglcore_one/x.py", "from sglcore_two import package"),
    (rules.import_direction, "devices/one/sglcore_one/x.py", "from sglcore.engine.llm import LLM"),
    (rules.import_direction, "devices/one/sglcore_one/x.py", "from sglcore_sim.kinds import Kind"),
    (rules.import_direction, "sglcore/step/x.py", "from sglcore.runtime.y import z"),
    (rules.room_direction, "sglcore/serving/replicas/x.py", "from sglcore.serving.chat.y import z"),
    (rules.room_direction, "sglcore/serving/chat/parsers/x.py", "from sglcore.serving.http import y"),
    (rules.room_direction, "sglcore/serving/apis/one/x.py", "def later():\n    import sglcore.serving.http.y"),
    (rules.room_direction, "sglcore/serving/http/x.py", "from sglcore import serving"),
    (rules.room_direction, "sglcore/serving/x.py", ""),
    (rules.room_direction, "sglcore/serving/other/x.py", ""),
    (rules.torch_parts, "devices/one/sglcore_one/x.py", "from sglcore.runtime.y import z"),
    (rules.torch_parts, "devices/one/sglcore_one/x.py", "def later():\n    from sglcore.layers import y"),
    (rules.device_words, "sglcore/x.py", "# only on cuda"),
    (rules.device_words, "sglcore/x.py", "is_npu = False"),
    (rules.device_words, "sglcore/x.py", "class HipGraph: ..."),
    (rules.device_words, "sglcore/x.py", "cudagraphs = 1"),
    (rules.device_words, "sglcore/runtime/table.json", '{"where": "AMD"}'),
    (rules.device_words, "sglcore/runtime/xpu.py", ""),
    (rules.mutable_globals, "sglcore/x.py", "SEEN = {}"),
    (rules.mutable_globals, "sglcore/x.py", "SEEN: list[int] = [1]"),
    (rules.mutable_globals, "sglcore/x.py", "import collections\nSEEN = collections.defaultdict(list)"),
    (rules.mutable_globals, "sglcore/x.py", "class Seen:\n    all = set()"),
    (rules.mutable_globals, "devices/one/sglcore_one/x.py", "count = 0\ndef f():\n    global count\n    count += 1"),
    (rules.guessed_attributes, "sglcore/x.py", "def f(x):\n    return hasattr(x, 'y')"),
    (rules.thread_targets, "sglcore/x.py", "def f(x): ...\nThread(target=f).start()"),
    (rules.thread_targets, "sglcore/x.py", "def f(x, y=1): ...\nthreading.Thread(target=f, args=(1, 2, 3))"),
    (rules.thread_targets, "sglcore/x.py", "class A:\n    def f(self, x): ...\n    def g(self): Thread(target=self.f)"),
    (rules.thread_targets, "devices/one/sglcore_one/x.py", "threading.Timer(1.0, lambda x: x).start()"),
    (rules.thread_targets, "sglcore/x.py", "def g(f): threading.Thread(target=f).start()"),
    (rules.guessed_attributes, "sglcore/x.py", "def f(x):\n    return getattr(x, 'y', None)"),
    (rules.monkey_patches, "sglcore/x.py", "import json\njson.dumps = None"),
    (rules.monkey_patches, "sglcore/x.py", "import os.path\ndef f():\n    os.path.join = None"),
    (rules.monkey_patches, "sglcore/x.py", "from a import B\nsetattr(B, 'c', 1)"),
    (rules.monkey_patches, "sglcore/x.py", "from a import B\ndel B.c"),
    (rules.budgets, "sglcore/x.py", LONG_FUNCTION),
    (rules.budgets, "sglcore/x.py", NEARLY_LONG),
    (rules.budgets, "devices/one/sglcore_one/x.py", "pass\n" * 351),
    (rules.undocumented, "sglcore/x.py", "x = 1"),
    (rules.undocumented, "sglcore/x.py", '"""Doc."""\ndef f(): ...'),
    (rules.undocumented, "sglcore/x.py", '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self): ...'),
    (rules.fields_without_docstring, "sglcore/x.py", f"{RECORD}    b: int\n"),
    (rules.fields_without_docstring, "sglcore/x.py", f'{RECORD}    b: int\n    c: int\n    """Doc."""'),
    (
        rules.fields_without_docstring,
        "sglcore/x.py",
        RECORD.replace("dataclass(slots=True)", "batch_record(B)") + "    b: int",
    ),
    (rules.fields_without_docstring, "sglcore/x.py", f"class A(NamedTuple):\n{FIELDS}    b: int = 0"),
    (
        rules.fields_without_docstring,
        "sglcore/x.py",
        f"class A(Protocol[T]):\n{FIELDS}    b: int\n    def f(self): ...",
    ),
    (rules.fields_without_docstring, "devices/one/sglcore_one/x.py", f"{STRUCTS}    b: int"),
    (taken_names, "sglcore/x.py", "def f(name):\n    for name in 'ab':\n        pass\n    return name"),
    (taken_names, "sglcore/x.py", "def f():\n    a = 1\n    for b, a in c:\n        pass\n    g(h, a)"),
)

HARMLESS: tuple[tuple[Rule, str, str], ...] = (
    (rules.import_direction, "sglcore/engine/x.py", "from sglcore.schedule.y import z\nimport numpy"),
    (rules.import_direction, "sglcore/models/x.py", "from sglcore import __version__"),
    (rules.import_direction, "devices/one/sglcore_one/x.py", "from sglcore.runtime.y import z\nimport sglcore_one.y"),
    (rules.import_direction, "devices/one/sglcore_one/simulated/x.py", "from sglcore_sim.kinds import Kind"),
    (
        rules.room_direction,
        "sglcore/serving/apis/one/x.py",
        "from sglcore.serving.chat.y import z\nimport sglcore.engine",
    ),
    (rules.torch_parts, "devices/one/sglcore_one/x.py", "import torch\nfrom sglcore.runtime.y import z"),
    (rules.torch_parts, "devices/one/sglcore_one/x.py", "from sglcore.step.y import z"),
    (rules.device_words, "sglcore/x.py", "inputs = relationship = ascending = 1"),
    (rules.device_words, "sglcore/cli/aliases.py", "ROCM = 'hip'"),
    (rules.device_words, "sglcore/assets/demo/x.json", '"nvidia"'),
    (rules.mutable_globals, "sglcore/x.py", "__all__ = ['a']\nA = MappingProxyType({})\ndef f():\n    return []"),
    (rules.guessed_attributes, "sglcore/x.py", "def f(x):\n    return getattr(x, 'y')"),
    (rules.thread_targets, "sglcore/x.py", "def f(x, y=1): ...\nthreading.Thread(target=f, args=(1,), daemon=True)"),
    (rules.thread_targets, "sglcore/x.py", "class A:\n    def f(self): ...\n    def g(self): Thread(target=self.f)"),
    (rules.thread_targets, "sglcore/x.py", "threading.Timer(1.0, lambda: None).start()"),
    (rules.guessed_attributes, "sglcore/x.py", "def f(x):\n    return hasattr(x, 'y')  # foreign: tokenizers"),
    (rules.monkey_patches, "sglcore/x.py", "import time\ndef f(time):\n    time.now = 1"),
    (rules.monkey_patches, "sglcore/x.py", "import a\na.flag = 1  # foreign: the library's own switch"),
    (rules.budgets, "sglcore/x.py", "def work():\n" + "    pass\n" * 18),
    (rules.budgets, "sglcore/x.py", "def work():\n" + '    """Doc.' + "\n" * 400 + '"""\n' + "    # Why.\n" * 400),
    (
        rules.undocumented,
        "sglcore/x.py",
        '"""Doc."""\nclass A(B):\n    """Doc."""\n    def f(self): ...\ndef _g(): ...',
    ),
    (rules.budgets, "sglcore/x.py", DOCSTRINGS),
    (rules.fields_without_docstring, "sglcore/x.py", RECORD.replace('    """Doc."""\n', "")),
    (
        rules.fields_without_docstring,
        "sglcore/x.py",
        f'{RECORD}    b: int = setting(0, "Doc.")\n    c: ClassVar[int] = 0',
    ),
    (rules.fields_without_docstring, "sglcore/x.py", RECORD.replace("@dataclass(slots=True)\n", "") + "    b: int"),
    (
        taken_names,
        "sglcore/x.py",
        "def f():\n    for a in b:\n        pass\n    for a in c:\n        pass\n    return a",
    ),
    (taken_names, "sglcore/x.py", "def f(a):\n    for a in b:\n        pass\n    a = 1\n    return a"),
    (taken_names, "sglcore/x.py", "def f(a):\n    g(a)\n    for a in b:\n        g(a)"),
)


def planted(root: Path, name: str, text: str) -> Path:
    """Make a tree with one file."""
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return root


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Free the parsed trees of the whole source after these tests."""
    yield
    rules.parsed.cache_clear()


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    findings = rule(ROOT)
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize(("rule", "name", "text"), MUTANTS)
def test_the_rule_finds_what_is_planted(rule: Rule, name: str, text: str, tmp_path: Path) -> None:
    findings = rule(planted(tmp_path, name, text))
    assert len(findings) == 1, findings


@pytest.mark.parametrize(("rule", "name", "text"), HARMLESS)
def test_the_rule_leaves_alone_what_is_allowed(rule: Rule, name: str, text: str, tmp_path: Path) -> None:
    assert rule(planted(tmp_path, name, text)) == []


def test_every_rule_has_a_mutant() -> None:
    assert {rule for rule, _, _ in MUTANTS} == set(ALL)


def test_the_rules_see_the_core_and_the_device_packages() -> None:
    names = {source.name for source in rules.sources(ROOT)}
    assert {"sglcore/device/package.py", "devices/cpu/sglcore_cpu/probe.py"} <= names
