"""The device-neutral torch runtime: batches on the device, buffers, contexts, attention, model runners, workers."""
