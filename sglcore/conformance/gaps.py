"""Gaps as data: laws that a package does not satisfy yet, each with a reason, a link and an expiry
date.

A gap that passes, that matches no law, or that has expired is an error.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from sglcore.device.errors import ConfigError

T = TypeVar("T")
FILE = "gaps.toml"


@dataclass(frozen=True, slots=True)
class Gap:
    """One [[gap]] of a package's `gaps.toml`: a law that the device does not satisfy yet. `law` is
    a law's name, for all of its cases, or `name[case]`; `reason` says why, `link` is where it is
    tracked. `expiry` is the last day on which the gap counts."""

    law: str
    reason: str
    link: str
    expiry: datetime.date

    def covers(self, name: str) -> bool:
        """Return whether the gap is about the case `name`, written `law` or `law[case]`."""
        return self.law in (name, name.partition("[")[0])


def read_gaps(folder: Path | None) -> tuple[Gap, ...]:
    """Return the gaps in `gaps.toml` of a package's folder, in order; none without a folder or a
    file. Expired ones are returned too. Raises ConfigError for an entry that is not a gap."""
    file, values = read_tables(folder, FILE, "gap")
    given = values.pop("gap", [])
    if values or not isinstance(given, list):
        raise ConfigError(f"{file} has {', '.join(values) or 'gap as one table'}", wanted="[[gap]] tables only")
    wanted = "law, reason and link as texts, and expiry as a date such as 2030-01-31"
    return tuple(read_record(Gap, file, entry, wanted) for entry in given)


def read_tables(folder: Path | None, name: str, table: str) -> tuple[Path, dict[str, Any]]:
    """Read the TOML file `name` of a package's folder; return its path and its content, {} without
    a folder or a file. `table` is used in the message only. Raises ConfigError for invalid TOML."""
    file = (folder or Path()) / name
    if folder is None or not file.is_file():
        return file, {}
    try:
        return file, tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} cannot be read: {error}", wanted=f"TOML with [[{table}]] tables") from None


def read_record(record: type[T], file: Path, entry: Any, wanted: str) -> T:
    """Return `entry`, a table of a TOML file, as an object of the dataclass `record`. Raises
    ConfigError unless it has exactly the dataclass's fields, of their types, without empty text;
    `wanted` describes that in the message."""
    types = get_type_hints(record)
    found = sorted(entry) if isinstance(entry, dict) else []
    if found != sorted(types) or any(
        type(entry[key]) is not types[key] or not str(entry[key]).strip() for key in found
    ):
        what = record.__name__.lower()
        raise ConfigError(f"{file} has a {what} with {', '.join(found) or repr(entry)}", wanted=wanted)
    return record(**entry)


def gap_for(gaps: Sequence[Gap], name: str) -> Gap | None:
    """Return the gap for the case `name`, None if it has none. A gap for the exact case comes
    before one for the whole law."""
    exact = [gap for gap in gaps if gap.law == name]
    return next(iter(exact or [gap for gap in gaps if gap.covers(name)]), None)


def stale_gaps(gaps: Sequence[Gap], known: Collection[str], today: datetime.date) -> list[str]:
    """Return what is wrong with the gaps themselves, one text each, empty if nothing: expired
    before `today`, listed twice, or about no law. `known`: the name of every case, as
    `name[case]`."""
    wrong: list[str] = []
    for gap in gaps:
        if not any(gap.covers(name) for name in known):
            wrong.append(f"the gap {gap.law!r} matches no law of this device")
        if gap.expiry < today:
            wrong.append(f"the gap {gap.law!r} expired on {gap.expiry}: fix it, or renew its reason ({gap.link})")
    names = [gap.law for gap in gaps]
    wrong += [f"there are two gaps {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
    return wrong


def closed_gap(gap: Gap, name: str) -> str:
    """Return the message for a gap that must be removed, because the case `name` passes."""
    return f"{name} holds, but has a gap {gap.law!r} ({gap.reason}); remove the gap from {FILE}"
