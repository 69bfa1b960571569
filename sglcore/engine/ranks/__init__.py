"""Several processes that act as one worker, each with a part of the model: start, launch on hosts
or by Ray, watch, messages.
"""
