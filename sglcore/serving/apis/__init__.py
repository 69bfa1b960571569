"""The HTTP APIs, one folder for each protocol: they turn request bodies into runs, and events of
runs into answers."""
