"""One file for each architecture, in the published checkpoint's own names, and what reads their
checkpoints."""
