"""The room of engines: processes, what crosses to them and back, and the frontend over them all."""
