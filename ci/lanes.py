"""Lanes: where tests run. Each device package declares its own in `ci.toml`; nothing here knows a
device by name.

A lane is one device on one kind of machine: the host itself, a simulated accelerator, or hardware
with a runner.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOST = "host"
"""The capability of the lane that runs what needs no device at all."""
SELF_HOSTED = "self-hosted"
"""The label of every runner that is not GitHub's own."""
TORCH = "torch"
"""The capability of every lane in the project's own environment, where torch is installed."""
TEXTS = ("name", "simulator", "image", "options", "source", "group")
"""The keys of a row that hold a text; most hold a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of a package's `ci.toml`, `[[lane]]`."""

    name: str
    device: str
    """The folder of `devices/` that declares it."""
    capabilities: frozenset[str]
    """What it offers; a test that needs more runs elsewhere."""
    simulator: str = ""
    """What `--sim` takes; "" on a real device."""
    runner: tuple[str, ...] = ()
    """Labels of a machine that has the hardware; empty: any machine will do."""
    image: str = ""
    """The container that its job runs in; "" for none."""
    options: str = ""
    """What the container is started with, such as the devices that it gets."""
    packages: tuple[str, ...] = ()
    """Packages of the distribution that the image lacks and apt-get installs there."""
    setup: tuple[str, ...] = ()
    """Lines of bash that its job runs in the checkout before anything is installed for Python."""
    source: str = ""
    """A script of the vendor's, to be sourced wherever Python is started."""
    torch: tuple[str, ...] = ()
    """The versions of torch that it is run with, each by a job; the first here."""
    vendor_torch: bool = False
    """The vendor's torch lies in the machine's own Python, and is kept."""
    environment: tuple[str, ...] = ()
    """Requirements of an environment of its own, in which nothing else is installed; empty: the
    project's."""
    unpinned: tuple[str, ...] = ()
    """Packages of which that takes another version than constraints.txt has, because a library
    there asks for it."""
    folders: tuple[str, ...] = ()
    """The tests it runs; empty: all that it may."""
    ignore: tuple[str, ...] = ()
    """Files among them that it can not even collect."""
    only: frozenset[str] = frozenset()
    """It leaves out tests that need none of these, because another lane runs them; empty: it leaves
    out none."""
    group: str = ""
    """The group (ci/groups.py) that all its tests are of: it is run only where that is run
    whole."""

    @property
    def needs_hardware(self) -> bool:
        """It runs on a machine of its own."""
        return bool(self.runner)

    @property
    def is_hosted(self) -> bool:
        """GitHub has the machine: nobody needs to bring one."""
        return SELF_HOSTED not in self.runner

    @property
    def tests(self) -> tuple[str, ...]:
        """The folders whose tests may run here."""
        if self.folders:
            return self.folders
        own = (f"devices/{self.device}/tests",)
        return ("tests", *own, "simulator/tests") if self.simulator else ("tests", *own)

    def missing(self, needs: frozenset[str]) -> list[str]:
        """What keeps a test that needs these capabilities from running here, in order; nothing if
        it runs."""
        lacking = sorted(needs - self.capabilities)
        return lacking or ([] if not self.only or needs & self.only else [f"a need of {', '.join(sorted(self.only))}"])

    def takes(self, word: str) -> bool:
        """Whether a file or folder that a person asks for is one of those that it runs; all are,
        unless it lists them."""
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
    known = {"name", "capabilities", "simulator", "runner", "image", "options", "packages", "setup", "source", "torch"}
    known |= {"vendor_torch", "environment", "tests", "unpinned", "ignore", "only", "group"}
    unknown = sorted(row.keys() - known)
    if unknown or "name" not in row:
        what = f"unknown {', '.join(unknown)}" if unknown else "a lane without a name"
        raise LaneError(f"{path}: {what}; a lane has {', '.join(sorted(known))}")
    for key in sorted(row.keys()):
        wanted = bool if key == "vendor_torch" else str if key in TEXTS else list
        if not isinstance(row[key], wanted) or (wanted is list and not all(isinstance(x, str) and x for x in row[key])):
            what = "a list of texts, none empty" if wanted is list else f"a {wanted.__name__}"
            raise LaneError(f"{path}: {key} of lane {row['name']} is {row[key]!r}; wanted {what}")
    simulator, environment = row.get("simulator", ""), tuple(row.get("environment", ()))
    own = {"device", f"package.{device}", *(("simulator",) if simulator else ()), *(() if environment else (TORCH,))}
    return Lane(
        name=row["name"],
        device=device,
        capabilities=frozenset({*shared, *row.get("capabilities", ()), *own}),
        simulator=simulator,
        runner=tuple(row.get("runner", ())),
        image=row.get("image", ""),
        options=row.get("options", ""),
        packages=tuple(row.get("packages", ())),
        setup=tuple(row.get("setup", ())),
        source=row.get("source", ""),
        torch=tuple(row.get("torch", ())),
        vendor_torch=row.get("vendor_torch", False),
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

    A package's tests need the package; the simulator's need it; a test of `tests/` that declares
    nothing needs no device, and so runs on the host's lane alone.
    """
    parts = path.parts
    if "devices" in parts:
        return declared | {f"package.{parts[parts.index('devices') + 1]}"}
    if "simulator" in parts:
        return declared | {"simulator"}
    return declared or frozenset({HOST})
