"""The seam: what a device is, how one is found, chosen and brought up. Host data only; no tensor library.

Read `package.py` and `worker.py` first: together they are the whole contract. The other files are the core's side of it.
"""
