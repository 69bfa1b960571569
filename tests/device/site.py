"""A folder of planted distributions that offer device packages, as pip would leave them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from sglcore.device.discovery import GROUP, Installed, discover

_DECLARATION = """
from pathlib import Path
from sglcore.device.package import DevicePackage
from sglcore.device.pci import PciClaim
Path(__file__).with_name("imported").touch()
{body}
package = DevicePackage(
    name={declared!r} or {name!r}, api={api}, summary="planted", is_host={is_host}, probe="{module}.probe:probe",
    facts="{module}.parts:facts", worker="{module}.parts:Worker", attention={{"plain": "{module}.parts:Attention"}},
    graphs={{}}, kernels={{"own": "{module}.parts:kernels"}}, bring_up="{module}.parts:BRING_UP", pci=frozenset(map(PciClaim, {vendors})),
)
"""

_PROBE = """
from sglcore.device.probe import DeviceInfo, Fact, ProbeReport
def probe(named, system):
    {body}
    return ProbeReport(
        hardware=Fact({hardware} or (named and {offered}), "planted hardware", "plug it in"),
        driver=Fact({driver}, "planted driver", "mend the driver"),
        package=Fact(True, "planted package"),
        runtime=Fact({runtime}, "planted runtime", "mend the runtime", is_wanted={wanted}),
        devices=tuple(DeviceInfo(index, f"planted {{index}}") for index in range({devices})),
        hidden={hidden!r},
    )
"""

_PARTS = """
from sglcore.device.bring_up import BringUp
def pools(config): ...
def attention(config, pools): ...
BRING_UP = BringUp((pools, attention))
"""


@dataclass(frozen=True, slots=True)
class Planted:
    """The properties and the behaviour of one planted package."""

    name: str
    is_host: bool = False
    hardware: bool = True
    devices: int = 1
    hidden: str = ""
    offered: bool = False
    driver: bool = True
    runtime: bool = True
    wanted: bool = False
    api: int = 3
    tag: str = "[api-3]"
    body: str = ""
    probe_body: str = "pass"
    distribution: str = ""
    version: str = "1.0"
    vendors: tuple[int, ...] = ()
    declared: str = ""

    @property
    def module(self) -> str:
        """The module of its declaration."""
        return f"planted_{self.distribution.replace('-', '_') or self.name}"

    @property
    def dist(self) -> str:
        """The name of its distribution."""
        return self.distribution or f"sglcore-{self.name}"


@dataclass(frozen=True, slots=True)
class Site:
    """A folder of planted distributions."""

    path: Path

    def add(self, name: str, **how: object) -> Planted:
        """Plant a distribution that offers the device `name`."""
        planted = Planted(name, **how)  # type: ignore[arg-type]
        folder = self.path / planted.module
        folder.mkdir(parents=True)
        values = {field: getattr(planted, field) for field in (*Planted.__slots__, "module")}
        (folder / "__init__.py").write_text(_DECLARATION.format_map(values))
        (folder / "probe.py").write_text(_PROBE.format_map({**values, "body": planted.probe_body}))
        (folder / "parts.py").write_text(_PARTS)
        self.set_version(planted, planted.version)
        return planted

    def set_version(self, planted: Planted, version: str) -> None:
        """Write the distribution's metadata, replacing the old."""
        info = self.path / f"{planted.dist.replace('-', '_')}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {planted.dist}\nVersion: {version}\n")
        entry = f"[{GROUP}]\n{planted.name} = {planted.module}:package {planted.tag}\n"
        (info / "entry_points.txt").write_text(entry)

    def discover(self) -> tuple[Installed, ...]:
        """The device packages of this folder only."""
        points = (point for found in distributions(path=[str(self.path)]) for point in found.entry_points)
        return discover([point for point in points if point.group == GROUP])

    def was_imported(self, planted: Planted) -> bool:
        """Whether the module of a declaration has started to run."""
        return (self.path / planted.module / "imported").exists()

    def run(self, *words: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a Python process in this folder. It sees these distributions and the installed
        ones."""
        path = os.pathsep.join(filter(None, (str(self.path), os.environ.get("PYTHONPATH"))))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SGLCORE_")}
        return subprocess.run(
            (sys.executable, *words),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=self.path,
            env={**clean, "PYTHONPATH": path, "COLUMNS": "200", **(environ or {})},
        )
