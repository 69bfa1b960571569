"""Lanes: where tests run. Each device package declares its lanes in `ci.toml`; this module knows no
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
"""The capability of the lane that runs the tests that need no device."""
SELF_HOSTED = "self-hosted"
"""The label of every runner that is not hosted by GitHub."""
TORCH = "torch"
"""The capability of lanes in the project's own environment, where torch is installed."""
TEXTS = ("name", "simulator", "image", "options", "source", "group")
"""The keys of a row that hold a string; the others hold a list, `vendor_torch` a boolean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of a package's `ci.toml`, `[[lane]]`."""

    name: str
    device: str
    """The folder of `devices/` that declares it."""
    capabilities: frozenset[str]
    """What it offers; a test that needs other capabilities runs elsewhere."""
    simulator: str = ""
    """The value of `--sim`; "" on a real device."""
    runner: tuple[str, ...] = ()
    """Labels of a machine that has the hardware; empty: any machine will do."""
    image: str = ""
    """The container that its job runs in; "" for none."""
    options: str = ""
    """Options for starting the container, such as the devices that it gets."""
    packages: tuple[str, ...] = ()
    """Packages of the distribution that the image lacks and apt-get installs there."""
    setup: tuple[str, ...] = ()
    """Lines of bash that its job runs in the checkout before Python packages are installed."""
    source: str = ""
    """A vendor's script that is sourced before Python is started."""
    torch: tuple[str, ...] = ()
    """The versions of torch that it runs with, one job each; a local run uses the first."""
    vendor_torch: bool = False
    """The machine's own Python has the vendor's torch, which is kept."""
    environment: tuple[str, ...] = ()
    """Requirements of an environment of its own, in which nothing else is installed; empty: the
    project's."""
    unpinned: tuple[str, ...] = ()
    """Packages that its environment installs without the version of constraints.txt, because a
    library there requires another."""
    folders: tuple[str, ...] = ()
    """Files and folders of the tests that it runs; empty: the defaults of `tests`."""
    ignore: tuple[str, ...] = ()
    """Test files that it can not even collect."""
    only: frozenset[str] = frozenset()
    """It takes only tests that need one of these capabilities, because another lane runs the rest;
    empty: no restriction."""
    group: str = ""
    """The group (ci/groups.py) of all its tests: the lane runs only when this group runs whole."""

    @property
    def needs_hardware(self) -> bool:
        """Whether it needs a machine with its hardware."""
        return bool(self.runner)

    @property
    def is_hosted(self) -> bool:
        """Whether GitHub provides the machine."""
        return SELF_HOSTED not in self.runner

    @property
    def tests(self) -> tuple[str, ...]:
        """The folders of tests that may run on this lane."""
        if self.folders:
            return self.folders
        own = (f"devices/{self.device}/tests",)
        return ("tests", *own, "simulator/tests") if self.simulator else ("tests", *own)

    def missing(self, needs: frozenset[str]) -> list[str]:
        """Return, sorted, the needed capabilities that the lane lacks, or that the test needs one
        of `only`; empty if the test runs."""
        lacking = sorted(needs - self.capabilities)
        return lacking or ([] if not self.only or needs & self.only else [f"a need of {', '.join(sorted(self.only))}"])

    def takes(self, word: str) -> bool:
        """Return whether the lane runs a requested file or folder; any, unless `folders` is set."""
        path = Path(word.partition("::")[0])
        return not self.folders or any(path.is_relative_to(folder) for folder in self.folders)


class LaneError(Exception):
    """A `ci.toml` or option that can not be used: says which, what was found and what is valid."""


def lanes(root: Path = ROOT) -> tuple[Lane, ...]:
    """Return all lanes of all packages: the host's first, hardware lanes last, each by name. Raises
    LaneError."""
    found = [lane for path in sorted(root.glob("devices/*/ci.toml")) for lane in read(path)]
    names = [lane.name for lane in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LaneError(f"two packages declare the lane {', '.join(twice)}; give each lane a name of its own")
    return tuple(sorted(found, key=lambda lane: (HOST not in lane.capabilities, lane.needs_hardware, lane.name)))


def read(path: Path) -> tuple[Lane, ...]:
    """Read the lanes of one `ci.toml`. Raises LaneError."""
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
    """Return the lane of a name. Raises LaneError with the known names."""
    for lane in found:
        if lane.name == name:
            return lane
    raise LaneError(f"there is no lane {name!r}; there are: {', '.join(lane.name for lane in found)}")


def needs_of(path: Path, declared: frozenset[str]) -> frozenset[str]:
    """Return the capabilities that a test needs: the declared ones, and one by its folder.

    Tests of a device package need the package, tests of the simulator need the simulator. A test of
    `tests/` that declares nothing needs HOST, so it runs on the host's lane only.
    """
    parts = path.parts
    if "devices" in parts:
        return declared | {f"package.{parts[parts.index('devices') + 1]}"}
    if "simulator" in parts:
        return declared | {"simulator"}
    return declared or frozenset({HOST})
