"""The device interface: what a device package declares, and how devices are found, chosen and
started. Host data only, no tensor library.

Read `package.py` and `worker.py` first: together they are the whole contract. The other files are
the core's side of it.
"""
