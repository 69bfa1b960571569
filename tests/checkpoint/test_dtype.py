"""What the ledger says of the element type in which a model is computed."""

from __future__ import annotations

import pytest

from sglcore.checkpoint.dtype import choose_dtype
from sglcore.core.errors import ConfigError
from sglcore.device.facts import Facts

ALL = ("float32", "float16", "bfloat16")
OWN, ASKED = "the checkpoint's own", "requested"
WIDE = "auto does not compute in the checkpoint's float64"


@pytest.mark.parametrize(
    ("asked", "stored", "dtypes", "preferred", "effective", "reason"),
    [
        ("float16", "bfloat16", ALL, "bfloat16", "float16", ASKED),
        ("float32", "float32", ALL, None, "float32", ASKED),
        ("auto", "float16", ALL, None, "float16", OWN),
        ("auto", "float32", ALL, "bfloat16", "float32", OWN),
        ("auto", "bfloat16", ALL, "bfloat16", "bfloat16", OWN),
        ("auto", "bfloat16", ALL, "float32", "bfloat16", OWN),
        ("auto", "float64", ALL, "bfloat16", "float32", WIDE),
        ("auto", "float16", ALL, "bfloat16", "bfloat16", "this device prefers it to the checkpoint's float16"),
        ("auto", "bfloat16", ALL, "float16", "float16", "this device prefers it to the checkpoint's bfloat16"),
        (
            "auto",
            "float64",
            ("float16", "bfloat16"),
            "bfloat16",
            "bfloat16",
            "the checkpoint's float64 is converted: this device computes in float16, bfloat16",
        ),
        (
            "auto",
            "bfloat16",
            ("float16", "float32"),
            None,
            "float16",
            "the checkpoint's bfloat16 is converted: this device computes in float16, float32",
        ),
        (
            "auto",
            "bfloat16",
            ("float32",),
            None,
            "float32",
            "the checkpoint's bfloat16 is converted: this device computes in float32",
        ),
        (
            "auto",
            "float16",
            ("bfloat16", "float32"),
            "float32",
            "float32",
            "the checkpoint's float16 is converted: this device computes in bfloat16, float32",
        ),
        (
            "auto",
            "float32",
            ("float16", "bfloat16"),
            "bfloat16",
            "bfloat16",
            "the checkpoint's float32 is converted: this device computes in float16, bfloat16",
        ),
    ],
)
def test_the_decision_has_its_reason_and_how_to_change_it(
    asked: str, stored: str, dtypes: tuple[str, ...], preferred: str | None, effective: str, reason: str
) -> None:
    row = choose_dtype(asked, stored, Facts("cpu", dtypes=dtypes, preferred_dtype=preferred))
    assert (row.topic, row.requested, row.effective, row.reason) == ("dtype", asked, effective, reason)
    # Float32 has every value of the other types.
    assert (row.remedy, row.downgrade) == ("--dtype", "is converted" in reason and effective != "float32")


@pytest.mark.parametrize("name", ["float64", "float8", "int8", "auto16"])
def test_no_device_computes_in_other_types(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the dtype '{name}' cannot be used for computing; wanted one of float32"):
        choose_dtype(name, "float32", Facts("cpu", dtypes=ALL))
    if name != "float64":
        with pytest.raises(ConfigError, match="wanted one of float32, bfloat16, float16, float64; convert the check"):
            choose_dtype("auto", name, Facts("cpu", dtypes=ALL))
