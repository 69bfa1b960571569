"""The load generator of `sglcore bench`: workloads, the client, statistics and plots."""
