"""Moore Threads GPUs as a device. Importing this module loads only the declaration."""

from sglcore.device.package import DevicePackage
from sglcore.device.pci import ACCELERATOR_CLASSES, DISPLAY_CLASS, PciClaim
from sglcore.worker.topology import Communication

package = DevicePackage(
    name="musa",
    api=3,
    summary="Moore Threads GPUs, by torch_musa's own names",
    probe="sglcore_musa.probe:probe",
    facts="sglcore_musa.facts:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={
        "flash_attention": "sglcore_musa.attention_flash:FlashAttention",
        "triton": "sglcore_musa.attention_triton:TritonAttention",
        "gathered": "sglcore.runtime.attention.gathered:GatheredAttention",
        "reference": "sglcore.runtime.attention.reference:ReferenceAttention",
    },
    graphs={
        "full": "sglcore_musa.graphs:full",
        "breakable": "sglcore_musa.graphs:breakable",
        "piecewise": "sglcore_musa.graphs:piecewise",
    },
    kernels={"triton": "sglcore_musa.kernels:kernels"},
    bring_up="sglcore_musa.bring_up:BRING_UP",
    communication=Communication("mccl", interface_variable="MCCL_SOCKET_IFNAME"),
    pci=frozenset({PciClaim(0x1ED5, ACCELERATOR_CLASSES | {DISPLAY_CLASS})}),
)
"""The declaration that `sglcore devices` and the core read."""
