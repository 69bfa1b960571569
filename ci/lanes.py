"""Lanes: where tests run. Each device package declares its own in `ci.toml`; nothing here knows a device by name.

A lane is one device on one kind of machine: the host itself, a simulated accelerator, or hardware with a runner.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOST = "host"
"""The capability of the lane that runs what needs no device at all."""
TORCH = "torch"
"""The capability of every lane in the project's own environment, where torch is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of a package's `ci.toml`, `[[lane]]`.

    `simulator` is what `--sim` takes ("" on a real device); `runner` the labels of a machine that has the hardware (empty:
    any machine will do); `torch` the versions it is run with, the first here; `image` a container to run in. `environment`
    are the requirements of an environment of its own, in which nothing else is installed (empty: the project's), and
    `unpinned` the packages of which it takes another version than constraints.txt has, because a library there asks for it;
    `folders` the tests it runs (empty: all that it may), `ignore` files among them that it can not even collect. `only`: it
    leaves out tests that need none of these capabilities, because another lane runs them (empty: it leaves out none). `group`: the
    group (ci/groups.py) that all its tests are of; it is run only where that is run whole.
    """

    name: str
    device: str
    capabilities: frozenset[str]
    simulator: str = ""
    runner: tuple[str, ...] = ()
    image: str = ""
    torch: tuple[str, ...] = ()
    setup: str = ""
    environment: tuple[str, ...] = ()
    unpinned: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    only: frozenset[str] = frozenset()
    group: str = ""

    @property
    def needs_hardware(self) -> bool:
        """It runs on a machine of its own."""
        return bool(self.runner)

    @property
    def tests(self) -> tuple[str, ...]:
        """The folders whose tests may run here."""
        if self.folders:
            return self.folders
        own = (f"devices/{self.device}/tests",)
        return ("tests", *own, "simulator/tests") if self.simulator else ("tests", *own)

    def missing(self, needs: frozenset[str]) -> list[str]:
        """What keeps a test that needs these capabilities from running here, in order; nothing if it runs."""
        lacking = sorted(needs - self.capabilities)
        return lacking or ([] if not self.only or needs & self.only else [f"a need of {', '.join(sorted(self.only))}"])

    def takes(self, word: str) -> bool:
        """Whether a file or folder that a person asks for is one of those that it runs; all are, unless it lists them."""
        path = Path(word.partition("::")[0])
        return not self.folders or any(path.is_relative_to(folder) for folder in self.folders)


class LaneError(Exception):
    """A `ci.toml` that can not be used: which, what was found and what was wanted."""


def lanes(root: Path = ROOT) -> tuple[Lane, ...]:
    """Every lane of every package, the host's first, then by name; raises LaneError."""
    found = [lane for path in sorted(root.glob("devices/*/ci.toml")) for lane in read(path)]
    names = [lane.name for lane in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LaneError(f"two packages declare the lane {', '.join(twice)}; give each lane a name of its own")
    return tuple(sorted(found, key=lambda lane: (HOST not in lane.capabilities, lane.needs_hardware, lane.name)))


def read(path: Path) -> tuple[Lane, ...]:
    """The lanes of one `ci.toml`."""
    device = path.parent.name
    try:
        declared = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise LaneError(f"{path}: {error}") from None
    rows = declared.get("lane")
    if not isinstance(rows, list) or not rows:
        raise LaneError(f"{path} declares no lane; wanted at least one [[lane]] with name and capabilities")
    shared = declared.get("device", {}).get("capabilities", [])
    return tuple(_lane(path, device, row, shared) for row in rows)


def _lane(path: Path, device: str, row: dict[str, Any], shared: list[str]) -> Lane:
    known = {"name", "capabilities", "simulator", "runner", "image", "torch", "setup", "environment", "tests"}
    known |= {"unpinned", "ignore", "only", "group"}
    unknown = sorted(row.keys() - known)
    if unknown or "name" not in row:
        what = f"unknown {', '.join(unknown)}" if unknown else "a lane without a name"
        raise LaneError(f"{path}: {what}; a lane has {', '.join(sorted(known))}")
    simulator, environment = row.get("simulator", ""), tuple(row.get("environment", ()))
    own = {"device", f"package.{device}", *(("simulator",) if simulator else ()), *(() if environment else (TORCH,))}
    return Lane(
        name=row["name"],
        device=device,
        capabilities=frozenset({*shared, *row.get("capabilities", ()), *own}),
        simulator=simulator,
        runner=tuple(row.get("runner", ())),
        image=row.get("image", ""),
        torch=tuple(row.get("torch", ())),
        setup=row.get("setup", ""),
        environment=environment,
        unpinned=tuple(row.get("unpinned", ())),
        folders=tuple(row.get("tests", ())),
        ignore=tuple(row.get("ignore", ())),
        only=frozenset(row.get("only", ())),
        group=row.get("group", ""),
    )


def lane_named(name: str, found: tuple[Lane, ...]) -> Lane:
    """One lane; an unknown name is an error that lists the known ones."""
    for lane in found:
        if lane.name == name:
            return lane
    raise LaneError(f"there is no lane {name!r}; there are: {', '.join(lane.name for lane in found)}")


def needs_of(path: Path, declared: frozenset[str]) -> frozenset[str]:
    """What a test in a file needs: what it declares, and what the folder it stands in says.

    A package's tests need the package; the simulator's need it; a test of `tests/` that declares nothing needs no
    device, and so runs on the host's lane alone.
    """
    parts = path.parts
    if "devices" in parts:
        return declared | {f"package.{parts[parts.index('devices') + 1]}"}
    if "simulator" in parts:
        return declared | {"simulator"}
    return declared or frozenset({HOST})
