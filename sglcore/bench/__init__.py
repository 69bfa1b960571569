"""Load generator and statistics of `sglcore bench`: workload, client, figures, plot."""
