"""The decision ledger: every resolved choice is a row that says what was asked, what was done, why, and the remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from sglcore.device.errors import StrictError


@dataclass(frozen=True, slots=True)
class Row:
    """One decision. `downgrade` is true when the effective value is less than what was asked for."""

    topic: str
    requested: str
    effective: str
    reason: str
    remedy: str = ""
    downgrade: bool = False


class DecisionLedger:
    """The rows of one start, in the order of the decisions. Rows are added, never changed or removed."""

    __slots__ = ("_about", "_rows", "_whole", "strict")

    def __init__(self, *, strict: bool = False) -> None:
        """`strict` turns every downgrade into a `StrictError`."""
        self.strict = strict
        self._rows: tuple[Row, ...] = ()
        self._about = ""
        self._whole: DecisionLedger | None = None

    def about(self, what: str) -> DecisionLedger:
        """A part of this ledger, whose rows are its own too, with `what` before their topics."""
        part = DecisionLedger(strict=self.strict)
        part._about, part._whole = what, self
        return part

    def record(self, *rows: Row) -> None:
        """Append rows; raises `StrictError` for the first downgrade when the ledger is strict (the row stays recorded)."""
        if self._whole is not None:
            self._rows += rows
            self._whole.record(*(replace(row, topic=f"{self._about} {row.topic}") for row in rows))
            return
        for row in rows:
            self._rows += (row,)
            if row.downgrade and self.strict:
                raise StrictError(
                    f"{row.topic}: found {row.effective} ({row.reason})",
                    wanted=row.requested,
                    remedy=row.remedy or "start without --strict to accept it",
                )

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows so far."""
        return self._rows

    def as_json(self) -> list[dict[str, object]]:
        """The rows as plain values, ready for `json.dumps`."""
        return [asdict(row) for row in self._rows]
