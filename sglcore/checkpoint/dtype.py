"""Which element type a model is computed in."""

from __future__ import annotations

from sglcore.device.errors import ConfigError
from sglcore.device.facts import Facts
from sglcore.device.ledger import Row

HALF = ("bfloat16", "float16")
WIDE = "float32"
"""The type that holds every value of the others."""


def choose_dtype(asked: str, stored: str, facts: Facts) -> Row:
    """The decision on the element type. Raises `ConfigError` for one that is asked for and that the
    device of `facts` does not compute in, and for a checkpoint's that nothing computes in.

    "auto" is the checkpoint's own type, except that one 16-bit type gives way to the one the device
    prefers, and that a type that the device does not compute in is converted: a downgrade, unless
    it is to float32.
    """
    if asked != "auto":
        _check(asked, facts.dtypes, "leave --dtype out, and the checkpoint's is taken or converted")
        return Row("dtype", asked, asked, "asked for", "--dtype")
    _check(stored, (WIDE, *HALF, "float64"), "convert the checkpoint")
    own, reason = stored, "the checkpoint's own"
    if stored == "float64":
        own, reason = WIDE, "the checkpoint's float64 is wider than anything is computed in"
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
            f"the dtype {name!r} can not be computed in", wanted=f"one of {', '.join(known)}", remedy=remedy
        )
