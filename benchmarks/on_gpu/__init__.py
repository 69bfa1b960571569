"""Parts of `benchmarks/gpu.py`: each measures one thing on an accelerator, in a process of its
own."""
