"""The processor as a device: chosen when no accelerator is present. Imports only what the
declaration needs."""

from sglcore.device.package import DevicePackage
from sglcore.worker.topology import Communication

package = DevicePackage(
    name="cpu",
    api=3,
    summary="x86 and Arm processors",
    is_host=True,
    probe="sglcore_cpu.probe:probe",
    facts="sglcore_cpu.facts:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={
        "paged": "sglcore_cpu.kernels.attention:PagedAttention",
        "reference": "sglcore.runtime.attention.reference:ReferenceAttention",
    },
    graphs={"native": "sglcore_cpu.native_graphs:native", "compiled": "sglcore_cpu.graphs:compiled"},
    kernels={
        "native": "sglcore_cpu.choice:kernels",
        "torch": "sglcore_cpu.kernels.torch_kernels:torch_kernels",
        "ipex": "sglcore_cpu.kernels.ipex:ipex_kernels",
    },
    bring_up="sglcore_cpu.bring_up:BRING_UP",
    communication=Communication("gloo"),
)
"""The declaration that `sglcore devices` and the core read."""
