"""The probe of the processor: describe it without importing a tensor library."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

from sglcore.device.probe import DeviceInfo, Fact, ProbeReport, installed_fact
from sglcore.device.system import System
from sglcore_cpu.kernels.extension import DISTRIBUTION, find_extension

CPUINFO = "/proc/cpuinfo"
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")
"""The instruction sets that matter for kernels, by Linux's names for them."""


def probe(named: bool, system: System) -> ProbeReport:
    """Implements `DevicePackage.probe`: report the processor (always present), the package and
    torch, each with the remedy if it is missing. `named` is not used. Raises nothing for a missing
    library."""
    model, features = processor(system.path(CPUINFO))
    extension = find_extension(system.torch_build().get("version", ""))
    details = {"features": " ".join(features), "cores": str(usable_cores()), "machine": platform.machine()}
    return ProbeReport(
        hardware=Fact(True, model),
        driver=Fact(True, f"{platform.system()} {platform.release()}; a processor needs no driver"),
        package=installed_fact("sglcore_cpu", "sglcore-cpu", "pip install sglcore-cpu"),
        runtime=installed_fact("torch", "torch", "pip install torch==2.13.0, or sglcore doctor"),
        devices=(DeviceInfo(0, model, memory(system)),),
        details=details if extension is None else {**details, DISTRIBUTION: str(extension)},
    )


def processor(cpuinfo: Path) -> tuple[str, tuple[str, ...]]:
    """Return the processor's name, and those of `FEATURES` (instruction sets) that it has, in that
    order, as the file `cpuinfo` reports them. Without the file the name comes from the system, and
    no features are found."""
    fields = _fields(cpuinfo)
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    model = fields.get("model name") or fields.get("Model") or _brand() or f"{platform.machine()} processor"
    return model, tuple(feature for feature in FEATURES if feature in flags)


def memory(system: System) -> int | None:
    """Return the bytes of the machine's physical memory; None if /proc/meminfo does not give
    them."""
    found = re.search(r"^MemTotal:\s*(\d+) kB", system.read("/proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) << 10 if found else None


def usable_cores() -> int:
    """Return the number of logical cores that this process may run on."""
    if platform.system() == "Linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _fields(cpuinfo: Path) -> dict[str, str]:
    """Return the fields of `cpuinfo` as text by name: those of the first block, which describes the
    first core, and those of the last block, which some systems add after the cores; the first block
    wins. Empty if the file can not be read."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return {}
    blocks = text.strip().split("\n\n")
    pairs = (line.partition(":") for line in (*blocks[-1].splitlines(), *blocks[0].splitlines()))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _brand() -> str:
    if platform.system() != "Darwin":
        return ""
    command = ("sysctl", "-n", "machdep.cpu.brand_string")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
