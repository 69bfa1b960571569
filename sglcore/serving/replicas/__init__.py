"""Engine processes: their start, supervision, messages and routing, and the frontend that uses
them."""
