"""The decision ledger: for each start-up choice, one row with the request, the choice, the reason
and the remedy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from sglcore.core.errors import StrictError


@dataclass(frozen=True, slots=True)
class Row:
    """One decision, as texts: its topic, the requested and the effective value, the reason, and how
    to change it. `downgrade`: the effective value is less than the requested one."""

    topic: str
    requested: str
    effective: str
    reason: str
    remedy: str = ""
    downgrade: bool = False


class DecisionLedger:
    """The rows of one start-up, in the order of the decisions. Rows are added, never changed or
    removed.
    """

    __slots__ = ("_about", "_rows", "_whole", "strict")

    def __init__(self, *, strict: bool = False) -> None:
        """`strict` turns every downgrade into a `StrictError`."""
        self.strict = strict
        self._rows: tuple[Row, ...] = ()
        self._about = ""
        self._whole: DecisionLedger | None = None

    def about(self, what: str) -> DecisionLedger:
        """Return a new ledger as a part of this one, as strict as this one: each row recorded there
        is also recorded here, with `what` and a space before its topic.
        """
        part = DecisionLedger(strict=self.strict)
        part._about, part._whole = what, self
        return part

    def record(self, *rows: Row) -> None:
        """Append rows. If the ledger is strict, raises `StrictError` for the first downgrade: its
        row stays recorded, the rows after it are not. A part (`about`) records its rows in the
        whole too.
        """
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
        """Return one dict per row, values by the names of the fields of `Row`, ready for
        `json.dumps`."""
        return [asdict(row) for row in self._rows]
