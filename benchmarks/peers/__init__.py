"""Parts of the comparison with other engines on a CPU: files, child processes, cases, figures, and
one runner per engine."""
