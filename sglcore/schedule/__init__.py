"""The scheduler: requests, pages, prefix cache, preemption, overlap. Host data only; it knows
neither text nor devices.

Read `step_loop.py` first, then `scheduler.py`.
Nothing here is thread-safe: one thread owns a loop and its scheduler.
"""
