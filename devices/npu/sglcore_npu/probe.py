"""Probes for Ascend NPUs: device nodes, the PCI bus, the driver, CANN, torch_npu. Does not import
torch_npu."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from sglcore.device.probe import DeviceInfo, Fact, ProbeReport, installed_fact
from sglcore.device.system import System
from sglcore.device.visible import visible_devices
from sglcore_npu import package

NODES = "/dev/davinci[0-9]*"
MANAGER = "/dev/davinci_manager"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
INSTALLED = "/etc/ascend_install.info"
"""The file in which the driver's installer writes its folder."""
DRIVER = "/usr/local/Ascend"
TOOLKITS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann", "/usr/local/Ascend/nnrt/latest")
OLDEST_CANN = (8, 3)
"""The oldest version with an attention operator that reads pages in packed layout."""
MOUNTS = (
    f"mount the NPU into the container: --device {MANAGER} --device /dev/davinci0 -v {DRIVER}/driver:{DRIVER}/driver"
)


def probe(named: bool, system: System) -> ProbeReport:
    """Implements `DevicePackage.probe` for Ascend NPUs: report hardware, driver, package and
    runtime (CANN, torch_npu), each with the remedy if it is missing, and the NPUs that this process
    sees. `named` has no effect. Raises nothing for what is missing."""
    nodes = _nodes(system)
    found = [DeviceInfo(index, node) for index, node in enumerate(nodes)]
    seen = visible_devices(found, system.environ, VISIBLE)
    return ProbeReport(
        hardware=_hardware(system, nodes),
        driver=_driver(system, nodes),
        package=installed_fact("sglcore_npu", "sglcore-npu", "pip install sglcore-npu"),
        runtime=seen.failure or _runtime(system),
        devices=seen.devices,
        hidden=seen.hidden,
    )


def _nodes(system: System) -> tuple[str, ...]:
    """Return the NPUs' device nodes, sorted by number; the runtime numbers those that are present
    from 0."""
    return tuple(node for node in system.numbered(NODES) if node.removeprefix("/dev/davinci").isdigit())


def _hardware(system: System, nodes: tuple[str, ...]) -> Fact:
    if nodes:
        return Fact(True, ", ".join(nodes))
    # The vendor's network and storage cards have the same vendor id, so the PCI class decides.
    found = system.pci(package.pci)
    if found:
        return Fact(True, f"{found[0]} on the bus, without a node {NODES}")
    if _library(system):
        return Fact(False, f"the driver's libascend_hal.so is there, but neither {NODES} nor an NPU on the bus", MOUNTS)
    return Fact(False, f"neither {NODES} nor an NPU on the PCI bus", "attach an NPU")


def _driver(system: System, nodes: tuple[str, ...]) -> Fact:
    library, found = _library(system), driver_version(system)
    if library is None:
        return Fact(False, "there is no libascend_hal.so", f"install the Ascend driver; in a container, {MOUNTS}")
    if not nodes or not system.exists(MANAGER):
        missing = MANAGER if nodes else NODES
        return Fact(False, f"{library}, but no node {missing}", f"load the driver (npu-smi info), or {MOUNTS}")
    return Fact(True, f"{library}, version {found or 'unknown'}")


def driver_folder(system: System) -> str:
    """Return the folder of the driver's files, from its installer's record or else the usual one;
    it need not exist."""
    found = re.search(r"^Driver_Install_Path_Param=(\S+)", system.read(INSTALLED) or "", re.MULTILINE)
    return f"{found.group(1) if found else DRIVER}/driver"


def driver_version(system: System) -> str | None:
    """Return the installed driver's version, such as "25.0.rc1"; None if its file does not name
    one."""
    found = re.search(r"^Version=(\S+)", system.read(f"{driver_folder(system)}/version.info") or "", re.MULTILINE)
    return found.group(1) if found else None


def _library(system: System) -> str | None:
    folder = driver_folder(system)
    return system.library("libascend_hal.so", f"{folder}/lib64/driver", f"{folder}/lib64/common", f"{folder}/lib64")


def toolkit(system: System) -> str | None:
    """Return the folder of CANN, by the environment or from the usual places; None if no folder has
    its runtime library."""
    named = [system.environ.get(name, "") for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    folders = (folder for folder in (*named, *TOOLKITS) if folder)
    return next((folder for folder in folders if system.exists(f"{folder}/lib64/libascendcl.so")), None)


def toolkit_version(system: System, folder: str) -> tuple[int, int] | None:
    """Return major and minor version of the CANN in `folder`; None if unknown."""
    for path in (f"{folder}/version.cfg", *system.glob(f"{folder}/*-linux/ascend_toolkit_install.info")):
        found = re.search(
            r"(?:toolkit_running_version=\[|^version=)\D*(\d+)\.(\d+)", system.read(path) or "", re.MULTILINE
        )
        if found:
            return int(found.group(1)), int(found.group(2))
    return None


def _runtime(system: System) -> Fact:
    torch = system.torch_build().get("version")
    folder = toolkit(system)
    if torch is None:
        return Fact(False, "torch is not installed", "pip install torch==2.13.0, then torch_npu of the same version")
    if folder is None:
        remedy = "install CANN and source its set_env.sh, which sets ASCEND_HOME_PATH"
        return Fact(False, f"no CANN in ASCEND_HOME_PATH, {', '.join(TOOLKITS)}", remedy)
    cann = toolkit_version(system, folder)
    if cann is not None and cann < OLDEST_CANN:
        wanted = ".".join(map(str, OLDEST_CANN))
        return Fact(False, f"CANN {cann[0]}.{cann[1]} in {folder}", f"install CANN {wanted} or newer")
    wanted = torch.partition("+")[0]
    if not system.module("torch_npu"):
        return Fact(False, "there is no module 'torch_npu'", f"pip install torch_npu=={wanted}")
    found = extension_version(system)
    if found is not None and not same_release(torch, found):
        remedy = f"pip install torch_npu=={wanted}, or the torch that fits"
        return Fact(False, f"torch_npu {found} with torch {torch}; they must be of one version", remedy)
    said = f"{cann[0]}.{cann[1]}" if cann else "of unknown version"
    return Fact(True, f"torch {torch}, torch_npu {found or 'of unknown version'}, CANN {said} in {folder}")


def extension_version(system: System) -> str | None:
    """Return the version of torch_npu without importing it; None if it is not installed, or its
    version is unknown."""
    found = re.search(r"__version__ = '([^']+)'", system.read("/site-packages/torch_npu/version.py") or "")
    if found or not system.is_this_machine:
        return found.group(1) if found else None
    try:
        return version("torch_npu")
    except PackageNotFoundError:
        return None


def same_release(torch: str, extension: str) -> bool:
    """Return whether the extension of version `extension` fits torch of version `torch`: it is
    built for one minor version of torch, so the first two numbers must be equal."""
    return torch.split(".")[:2] == extension.split(".")[:2]
