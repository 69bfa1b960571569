"""Load for a server or an engine, and what came of it: workload, client, figures, plot. It knows no device."""
