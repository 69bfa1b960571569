"""Several schedulers of one model (DP ranks) that plan their steps together."""
