"""The files that `sglcore new-device` writes for a torch device."""

from __future__ import annotations

from pathlib import Path

from sglcore.conformance.device_template import write_package


def test_what_registers_the_device_with_torch_comes_before_the_device_is_named(tmp_path: Path) -> None:
    write_package("acme", tmp_path / "acme", "torch_acme")
    steps = [line.split()[0] for line in (tmp_path / "acme/sglcore_acme/bring_up.txt").read_text().splitlines() if line]
    assert steps.index("vendor") < steps.index("device") < steps.index("world")
