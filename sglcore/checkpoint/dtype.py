"""Which element type a model is computed in."""

from __future__ import annotations

from sglcore.device.errors import ConfigError
from sglcore.device.ledger import Row

COMPUTED = ("float32", "bfloat16", "float16")
"""The types that devices compute in, by name."""

HALF = ("bfloat16", "float16")


def choose_dtype(asked: str, stored: str, preferred: str | None) -> Row:
    """The decision on the element type; raises `ConfigError` for a name that is not one of `COMPUTED`.

    "auto" is the checkpoint's own type, except that one 16-bit type gives way to the one the device prefers.
    """
    if asked != "auto":
        effective, reason = asked, "asked for"
    elif stored in HALF and preferred in HALF and stored != preferred:
        effective, reason = str(preferred), f"this device prefers it to the checkpoint's {stored}"
    elif stored == "float64":
        effective, reason = "float32", "the checkpoint's float64 is wider than anything is computed in"
    else:
        effective, reason = stored, "the checkpoint's own"
    if effective not in COMPUTED:
        raise ConfigError(
            f"the dtype {effective!r} can not be computed in", wanted=f"auto or one of {', '.join(COMPUTED)}"
        )
    return Row("dtype", asked, effective, reason, "--dtype")
