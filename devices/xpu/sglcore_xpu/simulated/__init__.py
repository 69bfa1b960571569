"""The simulated Intel GPUs of `--sim=xpu`, if sglcore-sim is installed; the device package does not
import this.

The values are from Intel's publications, under the names of torch's `xpu` properties; none was read
from a machine. A GPU with two stacks is two devices, as in its driver.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from sglcore_sim.kinds import Kind, pci

MIB = 1 << 20
DISPLAY, OTHER_DISPLAY = 0x030000, 0x038000


def chip(name: str, arch: str, device: int, pci_class: int, mib: int, figures: dict[str, Any]) -> Kind:
    """Make the kind of a GPU with the driver `xe`, Level Zero, and a torch build for it.

    `name`: its name for `--sim`; `arch`: the compilers' name, such as bmg-g21; `device`: PCI device
    id; `pci_class`: PCI class of 24 bits; `mib`: memory in MiB; `figures`: as `figures` returns
    them, with the product's name.
    """
    node = f"DRIVER=xe\nPCI_CLASS={pci_class:X}\nPCI_ID=8086:{device:04X}\nPCI_SLOT_NAME=0000:{{bus}}:00.0\n"
    files = {
        "dev/dri/renderD{render}": "",
        "sys/class/drm/renderD{render}/device/uevent": node,
        "usr/lib/x86_64-linux-gnu/libze_loader.so.1": "",
        "usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1": "",
        "site-packages/torch/version.py": (
            "__version__ = '{torch}+xpu'\ncuda: str | None = None\nhip: str | None = None\n"
            "xpu: str | None = '20250302'\n"
        ),
        **pci(0x8086, device, pci_class),
    }
    return Kind(
        name="xpu",
        torch_name="xpu",
        arch=arch,
        properties=MappingProxyType({**COMMON, **figures, "device_id": device, "total_memory": mib * MIB}),
        face="sglcore_xpu.simulated.face:plant",
        collectives="xccl",
        files=MappingProxyType(files),
        chip=name,
    )


COMMON = MappingProxyType(
    {
        "platform_name": "Intel(R) oneAPI Unified Runtime over Level-Zero",
        "vendor": "Intel(R) Corporation",
        "driver_version": "1.6.33578",
        "version": "20.1.0",
        "type": "gpu",
        "max_work_group_size": 1024,
        "has_fp16": True,
        "has_atomic64": True,
        "has_bfloat16_conversions": True,
        "has_subgroup_matrix_multiply_accumulate": True,
        "has_subgroup_2d_block_io": True,
        "is_integrated_gpu": False,
        "uuid": bytes(16),
    }
)


def figures(
    name: str, cores: int, units: int, lanes: tuple[int, ...], local_kib: int, has_fp64: bool
) -> dict[str, Any]:
    """Return some fields of `torch.xpu.get_device_properties` by name. `name`: the product's name;
    each of `cores` Xe cores has `units` vector engines; `lanes`: sub-group sizes, ascending;
    `local_kib`: shared memory of a work-group in KiB."""
    return {
        "name": name,
        "gpu_subslice_count": cores,
        "gpu_eu_count": cores * units,
        "max_compute_units": cores * units,
        "max_num_sub_groups": 1024 // lanes[0],
        "sub_group_sizes": list(lanes),
        "local_mem_size": local_kib << 10,
        "has_fp64": has_fp64,
    }


KINDS = (
    chip(
        "B580", "bmg-g21", 0xE20B, DISPLAY, 12216, figures("Intel(R) Arc(TM) B580 Graphics", 20, 8, (16, 32), 128, True)
    ),
    chip(
        "Max1550",
        "pvc",
        0x0BD5,
        OTHER_DISPLAY,
        65520,
        figures("Intel(R) Data Center GPU Max 1550", 64, 8, (16, 32), 128, True),
    ),
    chip(
        "A770",
        "dg2-g10",
        0x56A0,
        DISPLAY,
        15930,
        figures("Intel(R) Arc(TM) A770 Graphics", 32, 16, (8, 16, 32), 64, False),
    ),
)
"""The chips; the first is the default of `--sim=xpu`."""
