"""Chooses the element type in which a model is computed."""

from __future__ import annotations

from sglcore.core.errors import ConfigError
from sglcore.core.ledger import Row
from sglcore.device.facts import Facts

HALF = ("bfloat16", "float16")
WIDE = "float32"
"""The type that can represent every value of the others."""


def choose_dtype(asked: str, stored: str, facts: Facts) -> Row:
    """Return the decision on the element type, as a ledger row. `asked` is "auto" or a type,
    `stored` the checkpoint's type. Raises `ConfigError` for a requested type that the device of
    `facts` does not compute in, and with "auto" for a checkpoint's type other than float32,
    bfloat16, float16 and float64.

    "auto" is the checkpoint's own type, with three exceptions: float64 becomes float32; a type that
    the device does not compute in becomes the one that it prefers, or its first one, which is a
    downgrade unless that is float32; and a 16-bit type becomes the 16-bit type that the device
    prefers.
    """
    if asked != "auto":
        _check(asked, facts.dtypes, "leave --dtype out to use the checkpoint's dtype, converted if necessary")
        return Row("dtype", asked, asked, "requested", "--dtype")
    _check(stored, (WIDE, *HALF, "float64"), "convert the checkpoint")
    own, reason = stored, "the checkpoint's own"
    if stored == "float64":
        own, reason = WIDE, "auto does not compute in the checkpoint's float64"
    if own not in facts.dtypes:
        taken = facts.preferred_dtype or facts.dtypes[0]
        reason = f"the checkpoint's {stored} is converted: this device computes in {', '.join(facts.dtypes)}"
        return Row("dtype", asked, taken, reason, "--dtype", downgrade=taken != WIDE)
    if own in HALF and facts.preferred_dtype in HALF and own != facts.preferred_dtype:
        own, reason = str(facts.preferred_dtype), f"this device prefers it to the checkpoint's {stored}"
    return Row("dtype", asked, own, reason, "--dtype")


def _check(name: str, known: tuple[str, ...], remedy: str) -> None:
    if name not in known:
        raise ConfigError(
            f"the dtype {name!r} cannot be used for computing", wanted=f"one of {', '.join(known)}", remedy=remedy
        )
