"""Who runs next: requests, scheduler, pages, prefix cache, overlap. Host data only; it knows neither text nor devices.

Read `loop.py` first, then `scheduler.py`. Nothing here is thread-safe: one thread owns a loop and its scheduler.
"""
