"""The kernel table and its reference semantics."""
