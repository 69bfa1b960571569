"""NVIDIA GPUs as a device. Importing this module loads only the declaration."""

from sglcore.device.package import DevicePackage
from sglcore.device.pci import ACCELERATOR_CLASSES, DISPLAY_CLASS, PciClaim
from sglcore.worker.topology import Communication

package = DevicePackage(
    name="cuda",
    api=3,
    summary="NVIDIA GPUs of compute capability 8.0 and newer",
    probe="sglcore_cuda.probe:probe",
    facts="sglcore_cuda.facts:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={
        "flashinfer": "sglcore_cuda.attention_flashinfer:FlashInferAttention",
        "flash_attention": "sglcore_cuda.attention_flash:FlashAttention",
        "triton": "sglcore_cuda.attention_triton:TritonAttention",
        "gathered": "sglcore.runtime.attention.gathered:GatheredAttention",
        "reference": "sglcore.runtime.attention.reference:ReferenceAttention",
    },
    graphs={
        "full": "sglcore_cuda.graphs:full",
        "breakable": "sglcore_cuda.graphs:breakable",
        "piecewise": "sglcore_cuda.graphs:piecewise",
    },
    kernels={"triton": "sglcore_cuda.kernels:kernels"},
    bring_up="sglcore_cuda.bring_up:BRING_UP",
    communication=Communication(
        "nccl", in_graphs=True, interface_variable="NCCL_SOCKET_IFNAME", cluster_resource="GPU"
    ),
    partition="sglcore_cuda.sm_partition:partition",
    pci=frozenset({PciClaim(0x10DE, ACCELERATOR_CLASSES | {DISPLAY_CLASS})}),
)
"""The declaration that `sglcore devices` and the core read."""
