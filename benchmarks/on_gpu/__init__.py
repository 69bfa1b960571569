"""Parts of `benchmarks/gpu.py`: each measures one thing on an accelerator, in its own process."""
