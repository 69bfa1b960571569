"""Parallel layouts (tp, dp, ep) of a model on a cluster and their estimated cost: `sglcore
advise`."""
