"""Probes for MLX: Apple silicon under macOS, or if named, a build of MLX for Linux. Does not import
MLX."""

from __future__ import annotations

import plistlib
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from xml.parsers.expat import ExpatError

from sglcore.device.probe import DeviceInfo, Fact, ProbeReport, installed_fact
from sglcore.device.system import System
from sglcore_mlx import sysctl

SYSTEM_VERSION = "/System/Library/CoreServices/SystemVersion.plist"
CPUINFO = "/proc/cpuinfo"
CUDA_NODES = "/dev/nvidia[0-9]*"
CUDA_LIBRARY = "libcuda.so.1"
OLDEST_MACOS = (14, 0)
"""The oldest macOS with wheels of MLX."""
OLDEST_MLX = (0, 32)
BACKENDS = ("mlx-metal", "mlx-cuda-13", "mlx-cuda-12", "mlx-cpu")
"""The distributions that contain MLX's library, one for each kind of device."""
APPLE = "use a Mac with Apple silicon"


@dataclass(frozen=True, slots=True)
class Build:
    """The installed MLX: its version ("" if unknown), the distribution that contains its library
    (`backend`), and the version of that distribution.

    `backend` is "source" for a library from none of BACKENDS, and "" if there is no library.
    """

    version: str
    backend: str
    backend_version: str

    @property
    def is_cuda(self) -> bool:
        """Whether it was built for CUDA."""
        return self.backend.startswith("mlx-cuda")


def probe(named: bool, system: System) -> ProbeReport:
    """Implements `DevicePackage.probe` for MLX: report hardware, driver, package and MLX build,
    each with the remedy if it is missing, and one device if the hardware holds. Machines other than
    Macs count only if `named` (the user chose this device). Raises nothing for what is missing."""
    macos, build = macos_version(system), mlx_build(system)
    if macos is not None:
        hardware, driver = _apple_silicon(system), _macos(macos)
    elif build is not None and build.is_cuda:
        hardware, driver = _cuda(named, system)
    else:
        hardware, driver = _processor(named, system)
    device = DeviceInfo(0, _name(system, build), sysctl.number(system, "hw.memsize"))
    return ProbeReport(
        hardware=hardware,
        driver=driver,
        package=installed_fact("sglcore_mlx", "sglcore-mlx", "pip install sglcore-mlx"),
        runtime=_runtime(system, build, macos is not None),
        devices=(device,) if hardware.holds else (),
        details={
            "chip": sysctl.text(system, "machdep.cpu.brand_string") or "",
            "macos": macos or "",
            "mlx": build.version if build else "",
            "build": build.backend if build else "",
        },
    )


def macos_version(system: System) -> str | None:
    """Return the version of macOS, such as "15.1"; None on other systems. If the system's file can
    not be parsed, "of unknown version"."""
    found = system.read(SYSTEM_VERSION)
    if found is None:
        return None
    try:
        return str(plistlib.loads(found.encode()).get("ProductVersion", "of unknown version"))
    except (plistlib.InvalidFileException, ExpatError):
        return "of unknown version"


def mlx_build(system: System) -> Build | None:
    """Return the installed MLX from the metadata of its distributions, without importing it; None
    if there is no module `mlx`."""
    folders = _folders(system)
    if not folders:
        return None
    found = _distribution(system, "mlx") or ""
    for backend in BACKENDS:
        backend_version = _distribution(system, backend)
        if backend_version is not None:
            return Build(found, backend, backend_version)
    has_library = any(path for folder in folders for path in folder.glob("lib/libmlx.*"))
    return Build(found, "source" if has_library else "", found)


def _folders(system: System) -> tuple[Path, ...]:
    """Return the folders of the module `mlx`; a namespace package can have several. Empty if it is
    not installed."""
    if not system.is_this_machine:
        return tuple(system.path(folder) for folder in system.glob("/site-packages/mlx"))
    spec = find_spec("mlx")
    return tuple(Path(folder) for folder in (spec.submodule_search_locations or ())) if spec is not None else ()


def _distribution(system: System, name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    if not system.is_this_machine:
        folder = "/site-packages/" + name.replace("-", "_")
        found = system.glob(f"{folder}-*.dist-info")
        return found[0].removeprefix(f"{folder}-").removesuffix(".dist-info") if found else None
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _apple_silicon(system: System) -> Fact:
    chip = sysctl.text(system, "machdep.cpu.brand_string") or "a processor without a name"
    if sysctl.number(system, "hw.optional.arm64") == 1:
        return Fact(True, f"{chip} with a Metal GPU")
    return Fact(False, f"{chip} under macOS, not Apple silicon", APPLE)


def _macos(found: str) -> Fact:
    wanted = ".".join(map(str, OLDEST_MACOS))
    if _numbers(found) < OLDEST_MACOS:
        return Fact(False, f"macOS {found}, too old for MLX", f"update to macOS {wanted} or newer")
    return Fact(True, f"macOS {found}, which brings Metal")


def _cuda(named: bool, system: System) -> tuple[Fact, Fact]:
    nodes, library = system.glob(CUDA_NODES), system.library(CUDA_LIBRARY)
    driver = Fact(True, library) if library else Fact(False, f"there is no {CUDA_LIBRARY}", "install NVIDIA's driver")
    if not named:
        return _not_named("MLX is built for CUDA here"), driver
    if not nodes:
        return Fact(
            False, f"MLX is built for CUDA, but there is no node {CUDA_NODES}", "pip install 'mlx[cpu]'"
        ), driver
    return Fact(True, f"{', '.join(nodes)}, requested by name"), driver


def _processor(named: bool, system: System) -> tuple[Fact, Fact]:
    name = processor_name(system)
    if name is None:
        return Fact(False, f"no macOS, and {CPUINFO} names no processor", APPLE), Fact(False, "no Metal", APPLE)
    driver = Fact(True, "a processor needs no driver")
    return (Fact(True, f"{name}, requested by name") if named else _not_named("no macOS, so no Metal")), driver


def _name(system: System, build: Build | None) -> str:
    """Return the name of the device that MLX uses by default: the Mac's chip, the first GPU's node
    for a CUDA build, or the CPU's name."""
    nodes = system.glob(CUDA_NODES) if build is not None and build.is_cuda else ()
    chip = sysctl.text(system, "machdep.cpu.brand_string")
    return chip or next(iter(nodes), None) or processor_name(system) or "a processor"


def _not_named(why: str) -> Fact:
    return Fact(False, f"{why}; on other systems MLX must be requested by name", f"--device mlx, or {APPLE}")


def processor_name(system: System) -> str | None:
    """Return Linux's name of the CPU; None if /proc/cpuinfo is missing or empty."""
    found = system.read(CPUINFO)
    if not found:
        return None
    named = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", found, re.MULTILINE)
    return named.group(1).strip() if named else "a processor"


def _runtime(system: System, build: Build | None, is_mac: bool) -> Fact:
    command = "pip install mlx" if is_mac else "pip install 'mlx[cpu]' (or 'mlx[cuda13]' with an NVIDIA GPU)"
    if sysctl.number(system, "sysctl.proc_translated") == 1:
        return Fact(False, "this Python is built for x86_64 and runs translated", "use a Python built for arm64")
    if build is None:
        return Fact(False, "there is no module 'mlx'", command)
    if build.version and _numbers(build.version) < OLDEST_MLX:
        wanted = ".".join(map(str, OLDEST_MLX))
        return Fact(False, f"mlx {build.version}", f"pip install --upgrade 'mlx>={wanted}'")
    if not build.backend:
        return Fact(False, f"mlx {build.version} without the library of any backend", command)
    if build.backend_version != build.version:
        found = f"mlx {build.version} with {build.backend} {build.backend_version}; they must be of one version"
        return Fact(False, found, f"pip install {build.backend}=={build.version}")
    what = "built from source" if build.backend == "source" else f"{build.backend} {build.backend_version}"
    return Fact(True, f"mlx {build.version or 'of unknown version'}, {what}")


def _numbers(found: str) -> tuple[int, int]:
    """Return the first two numbers of a version, with 0 for a missing second one. Without any
    number, return the largest pair, so that no minimum version refuses it."""
    numbers = re.match(r"(\d+)(?:\.(\d+))?", found)
    return (int(numbers.group(1)), int(numbers.group(2) or 0)) if numbers else (1 << 30, 0)
