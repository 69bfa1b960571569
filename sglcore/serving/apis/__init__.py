"""The protocols, one folder each: they turn request bodies into runs, and events into answers."""
