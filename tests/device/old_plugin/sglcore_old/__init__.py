"""A device as it was declared for API 1. Frozen: a test holds the digest of every file here."""

from sglcore.device.package import DevicePackage

package = DevicePackage(
    name="old",
    api=1,
    summary="a device written for API 1",
    probe="sglcore_old.parts:probe",
    facts="sglcore_old.parts:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={"reference": "sglcore.runtime.attention.reference:ReferenceAttention"},
    graphs={"again": "sglcore_old.parts:Again"},
    kernels="sglcore.runtime.kernels.reference:reference_kernels",
    bring_up="sglcore_old.order:BRING_UP",
)
