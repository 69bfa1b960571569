"""Gaps as data: laws that a package does not satisfy yet, each with a reason, a link and an expiry
date; and laws that are skipped on it, each with the reason and what to do instead.

A gap that passes, that matches no law, or that has expired is an error. A package that lists
skipped laws lists all of them: a skipped case without a row, and a row for a case that runs, are
errors.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from sglcore.core.errors import ConfigError

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


IMPOSSIBLE, NOT_YET = ANSWERS = ("impossible", "not yet")
"""Why a law is skipped: the device has nothing that it could check, or it lacks something that it
could have."""


@dataclass(frozen=True, slots=True)
class Skip:
    """One [[skip]] of a package's `gaps.toml`: a law that is skipped on the device. `law` as in
    `Gap`; `answer`: one of ANSWERS; `remedy`: what users do instead, or what it takes to run the
    law."""

    law: str
    answer: str
    reason: str
    remedy: str

    def covers(self, name: str) -> bool:
        """Return whether the row is about the case `name`, written `law` or `law[case]`."""
        return self.law in (name, name.partition("[")[0])

    @property
    def text(self) -> str:
        """The row for a person."""
        return f"{self.answer}: {self.reason}; {self.remedy}"


def read_skips(folder: Path | None) -> tuple[Skip, ...]:
    """Read the [[skip]] tables of `gaps.toml` in a package's folder; none without a folder or a
    file. Raises ConfigError for an entry that is not a skip."""
    file, values = read_tables(folder, FILE, "skip")
    wanted = f"law, reason and remedy as texts, and answer as one of {', '.join(ANSWERS)}"
    found = tuple(read_record(Skip, file, entry, wanted) for entry in values.get("skip", []))
    for row in found:
        if row.answer not in ANSWERS:
            raise ConfigError(f"{file} has a skip of {row.law!r} with answer = {row.answer!r}", wanted=wanted)
    return found


@dataclass(frozen=True, slots=True)
class Missing:
    """One [[missing]] of a package's `gaps.toml`: a feature that the device does not have and that
    no law checks. `answer`, `reason` and `remedy` as in `Skip`."""

    feature: str
    answer: str
    reason: str
    remedy: str


def read_missing(folder: Path | None) -> tuple[Missing, ...]:
    """Read the [[missing]] tables of `gaps.toml` in a package's folder; none without a folder or a
    file. Raises ConfigError for an entry that is not one, and for a feature that is there twice."""
    file, values = read_tables(folder, FILE, "missing")
    wanted = f"feature, reason and remedy as texts, and answer as one of {', '.join(ANSWERS)}; each feature once"
    found = tuple(read_record(Missing, file, entry, wanted) for entry in values.get("missing", []))
    names = [row.feature for row in found]
    for row in found:
        if row.answer not in ANSWERS or names.count(row.feature) > 1:
            raise ConfigError(f"{file} has {row.feature!r} with answer = {row.answer!r}", wanted=wanted)
    return found


def skip_for(skips: Sequence[Skip], name: str) -> Skip | None:
    """Return the row for the case `name`, None if it has none. One for the exact case comes before
    one for the whole law."""
    exact = [row for row in skips if row.law == name]
    return next(iter(exact or [row for row in skips if row.covers(name)]), None)


def wrong_skip(skips: Sequence[Skip], name: str, was_skipped: bool, text: str) -> str:
    """Return what is wrong with the rows, given whether the case `name` was skipped, for the reason
    `text`; empty if nothing is. Packages without rows say nothing about skipped cases."""
    row = skip_for(skips, name)
    if was_skipped and skips and row is None:
        return f"{name} is skipped ({text}), and {FILE} has no [[skip]] row for it"
    if not was_skipped and row is not None:
        return f"{name} runs, but {FILE} says that it is skipped ({row.reason}); remove the row"
    return ""


def stale_skips(skips: Sequence[Skip], known: Collection[str]) -> list[str]:
    """Return what is wrong with the rows themselves: listed twice, or about no law. `known`:
    `name[case]` of every case."""
    names = [row.law for row in skips]
    wrong = [f"there are two skips {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
    covered = [row for row in skips if not any(row.covers(name) for name in known)]
    return wrong + [f"the skip {row.law!r} matches no law of this device" for row in covered]


def read_gaps(folder: Path | None) -> tuple[Gap, ...]:
    """Return the gaps in `gaps.toml` of a package's folder, in order; none without a folder or a
    file. Expired ones are returned too. Raises ConfigError for an entry that is not a gap."""
    file, values = read_tables(folder, FILE, "gap")
    given = values.pop("gap", [])
    for other in ("skip", "missing"):
        values.pop(other, None)
    if values or not isinstance(given, list):
        found = f"{file} has {', '.join(values) or 'gap as one table'}"
        raise ConfigError(found, wanted="[[gap]], [[skip]] and [[missing]] tables only")
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
