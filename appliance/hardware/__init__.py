"""The machine: CPUs, memory and GPUs, read from the host or described by the operator."""
