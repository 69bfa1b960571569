"""quirk as a device. Nothing is imported but the declaration."""

from sglcore.device.package import DevicePackage

package = DevicePackage(
    name="quirk",
    api=3,
    summary="quirk accelerators",
    probe="sglcore_quirk.probe:probe",
    facts="sglcore_quirk.facts:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={
        "quirk": "sglcore_quirk.attention:QuirkAttention",
        "gathered": "sglcore.runtime.attention.gathered:GatheredAttention",
    },
    graphs={},
    kernels={"quirk": "sglcore_quirk.kernels:kernels"},
    bring_up="sglcore_quirk.bring_up:BRING_UP",
    pci=frozenset(),  # frozenset({PciClaim(0x1234)}): the vendor's number on the PCI bus; see sglcore/device/pci.py
)
"""What `sglcore devices` and the core read. When C2 holds without graphs, offer "full":
"sglcore_quirk.graphs:full"."""
