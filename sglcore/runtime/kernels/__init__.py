"""The kernel table: every operation with its formula, its reference, and the choice of an
implementation."""
