"""Quantization formats of checkpoints: one file each, listed in `registry.py`."""
