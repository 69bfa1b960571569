"""The kernels of the processor: native ones, torch's, and those of Intel's extension."""
