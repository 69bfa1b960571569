"""The declared fields that rows of draft tokens have from the requests that they continue, for any
tensor library.

They follow from the declarations (`Wide` in batch_field.py): each row gets the entry of its
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

from sglcore.step.batch_field import Axis, FieldSpec, When, Wide, leaves

Array = TypeVar("Array")


def continued(like: object, take: Callable[[FieldSpec, Any], Array]) -> Iterator[tuple[str, Array]]:
    """Yield the (dotted) name of each field that rows made on the device repeat and the batch
    `like` has, and `take(spec, value)`, the rows' entries of its value.
    """
    for spec in repeated(type(like)):
        value = value_of(like, spec.name)
        if value is not None:
            yield spec.name, take(spec, value)


def value_of(record: object, name: str) -> Any:
    """Return a field of a batch by its (dotted) name; None if it has no such field or nested
    record.
    """
    first, _, rest = name.partition(".")
    value = getattr(record, first)
    return value if value is None or not rest else value_of(value, rest)


@cache
def repeated(batch_type: type) -> tuple[FieldSpec, ...]:
    """Return the declarations of the fields of tensors that rows made on the device repeat.

    Raises TypeError for a repeated field that stays on the host: rows that the device makes cannot
    index it.
    """
    read = (spec for spec in leaves(batch_type) if spec.read is not None and spec.when is not When.EXTEND)
    found = tuple(spec for spec in read if spec.wide is Wide.REPEAT and spec.axis is not Axis.NONE)
    for spec in found:
        if not spec.is_buffered:
            raise TypeError(
                f"{batch_type.__name__}.{spec.name} stays on the host, so rows of draft tokens cannot repeat it; "
                "give it a dtype, or declare wide=Wide.PLACED"
            )
    return found
