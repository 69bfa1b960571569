"""This server's own endpoints: probes, what runs, what is counted, tokens."""
