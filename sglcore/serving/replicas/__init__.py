"""Engine processes: starting and supervising them, messages to and from them, routing, and the
frontend."""
