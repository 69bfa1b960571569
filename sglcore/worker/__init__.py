"""The interface between scheduler and worker: the batch of a step, the calls, the result, and what
ranks agree on. Host data only, no tensor library.

Read `model_worker.py` and `schedule_batch.py` first.
"""
