"""Checks what the candidates of a kernel entry say they take, against the kit's cases and against
what they do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from sglcore.conformance.inputs.kernel_cases import KernelCase
from sglcore.conformance.law import LawBroken
from sglcore.runtime.kernels.entry import Entry
from sglcore.runtime.kernels.kernel_choice import described_as
from sglcore.runtime.kernels.table import KernelTable, origin_of

PACKS = frozenset({"pack_linear", "pack_quantized", "quantize_linear", "pack_head", "pack_parts", "head"})
"""Entries that make or take packed weights."""
MAKES = PACKS - {"head"}
"""Entries of PACKS that refuse a weight by a ConfigError or by their result, not by what they
say."""
HANDS_ON = PACKS | {"linear"}
"""Entries that may pass plain weights to the next candidate."""


class Taking:
    """Checks what the candidates of one kernel entry say they take, over all cases of the entry.
    Its methods raise LawBroken."""

    def __init__(self, table: KernelTable, entry: Entry[Any]) -> None:
        self._table = table
        self._entry = entry
        self._held = table.candidates[entry.name]
        self._says: dict[tuple[int, tuple[str, int]], tuple[str, str]] = {}
        self._taken: Counter[int] = Counter()
        self._reasons: dict[int, str] = {}
        self._first = 0

    def table_for(self, case: KernelCase, args: Sequence[Any]) -> KernelTable | None:
        """Return the table in which the first candidate that says it takes the case, with arguments
        `args`, computes the entry; None if none takes it. Raises LawBroken as `_takes` does."""
        call = None if self._entry.name in MAKES else [described_as(arg) for arg in args]
        taking = [place for place in range(len(self._held)) if self._takes(place, case, call)]
        if not taking:
            return None
        self._first = taking[0]
        left = {self._entry.name: self._held[self._first :]}
        return type(self._table)(**{**self._table.candidates, **left}) if self._first else self._table

    def refused(self, reason: str) -> None:
        """Note that the candidate of the last `table_for` refused the case after all, with a
        ConfigError; `reason` is its text. `check` counts it."""
        self._taken[self._first] -= 1
        self._reasons[self._first] = reason

    @contextmanager
    def watched(self, case: KernelCase, table: KernelTable) -> Iterator[None]:
        """Context manager around the call of the case on `table`: raises LawBroken at its end if
        the candidate that ran has passed the case to a later candidate or to the reference. Only
        watched cases are observed, and not those of entries in HANDS_ON."""
        own, *behind = table.candidates[self._entry.name]
        others = {code_of(self._entry.reference), *(code_of(each.function) for each in behind)} - {
            code_of(own.function)
        }
        if not case.is_watched or self._entry.name in HANDS_ON:
            yield
            return
        entered: list[str] = []

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code in others:
                entered.append(f"{frame.f_globals['__name__']}:{frame.f_code.co_name}")

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)
        if entered:
            raise LawBroken(
                f"{origin_of(own.function)} declares that it takes {case.text}, but hands it to {entered[0]}"
            )

    def check(self) -> None:
        """Raise LawBroken if a candidate refused every case. Call it after all cases."""
        for place, reason in self._reasons.items():
            if self._taken[place] <= 0:
                raise LawBroken(f"{origin_of(self._held[place].function)} takes no case: {reason}")

    def _takes(self, place: int, case: KernelCase, call: Sequence[Any] | None) -> bool:
        """Return whether candidate number `place` says that it takes a case with the arguments
        `call` (None: it is not asked and takes it). Raises LawBroken if it said otherwise of
        another case of the same kind."""
        candidate = self._held[place]
        reason = "" if call is None else candidate.takes(*call)
        said, text = self._says.setdefault((place, case.kind), (reason, case.text))
        if bool(said) != bool(reason):
            raise LawBroken(
                f"{origin_of(candidate.function)} refuses {case.text if reason else text} ({said or reason}), but takes"
                f" {text if reason else case.text}; it must not depend on rows or strides"
            )
        self._taken[place] += not reason
        if reason:
            self._reasons[place] = reason
        return not reason


def code_of(kernel: Any) -> CodeType | None:
    """Return the Python code that a kernel begins with, that of the function, of a method or
    partial, or of an object's `__call__`; None if there is none."""
    kernel = kernel.func if isinstance(kernel, partial) else kernel
    kernel = kernel.__func__ if isinstance(kernel, MethodType) else kernel
    function = kernel if isinstance(kernel, FunctionType) else vars(type(kernel)).get("__call__")
    return function.__code__ if isinstance(function, FunctionType) else None
