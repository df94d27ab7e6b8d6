"""Time and tune the kernels: `python -m benchmarks.kernels`."""
