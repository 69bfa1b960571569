"""Finds changes of the contract that break packages written for an earlier text with the same
number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sglcore.device import package

MADE = ("Facts", "Fact", "ProbeReport", "DeviceInfo", "PciClaim", "Limits", "Ticket", "TokenLogprobs", "BatchResult")
MADE_WITH_TORCH = ("DevicePackage", "Communication", "AttentionFacts", "AttentionPlan", "Partition")
WRITTEN = ("ModelWorker", "GraphBackend", "CapturedStep", "PromptBackend", "CapturedPrompt", "StreamCapture", "Segment")
CALLED = ("System", "BringUp", "Imported by what `sglcore new-device` writes")
OLDER = Path(package.__file__).with_name(f"api{package.API}")
"""Modules that moved since the number was frozen, by their older names; they go with the next."""
TARGET = re.compile(r"^from (sglcore\.[\w.]+) import \*", re.MULTILINE)
OPTIONAL, ABSTRACT, LIST = " (optional)", " (abstract)", "names "


def moved_modules() -> Mapping[str, str]:
    """Return the module of today by the name that it had."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(OLDER.glob("[!_]*.py"))}
    return {f"sglcore.device.{stem}": target for stem, text in texts.items() for target in TARGET.findall(text)}


def breaks(old: str, new: str) -> list[str]:
    """Return the lines of the old text that are gone or changed, and new lines that an old package
    can not satisfy: a required field in a record that packages make, or a method that packages must
    define."""
    before, after = _sections(old), _sections(new)
    found = [f"{name} is gone" for name in before if name not in after]
    for name in before.keys() & after.keys():
        found += [
            f"{name}: {line!r} is gone or changed" for line in before[name] if not _is_kept(name, line, after[name])
        ]
        grown = [line for line in after[name] if _key(line) not in map(_key, before[name])]
        found += [f"{name}: {line!r} is new, and older packages do not have it" for line in grown if _must(name, line)]
    return sorted(found)


def _sections(text: str) -> Mapping[str, list[str]]:
    """Return the lines below each heading, without the number in the first heading."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in filter(None, text.splitlines()):
        if line.startswith(" "):
            found[name].append(line.strip())
        else:
            name = line.partition(",")[0]
            found[name] = []
    return found


def _is_kept(name: str, line: str, lines: list[str]) -> bool:
    """Whether the line is still there, or a line that accepts everything the old one accepted."""
    return any(other == line or _takes(other, line) or (name in CALLED and _has_more(other, line)) for other in lines)


def _takes(new: str, old: str) -> bool:
    if old.startswith(LIST):
        return new.startswith(LIST) and _names(old) <= _names(new)
    return new in (f"{old}{OPTIONAL}", old.removesuffix(ABSTRACT))


def _has_more(new: str, old: str) -> bool:
    """Whether the new signature of a function that packages call is the old one with more
    parameters at the end, all with defaults."""
    had, _, gave = old.rpartition(")")
    has, _, gives = new.rpartition(")")
    more = has.removeprefix(had).removeprefix(", ")
    return has.startswith(had) and gave == gives and all("=" in each or each == "*" for each in more.split(", "))


def _key(line: str) -> str:
    return line.partition(":")[0].partition("(")[0]


def _names(line: str) -> set[str]:
    return {name.strip() for name in line.removeprefix(LIST).split(",")}


def _must(name: str, line: str) -> bool:
    if name in (*MADE, *MADE_WITH_TORCH):
        return not line.endswith(OPTIONAL)
    return name in WRITTEN or line.endswith(ABSTRACT)
