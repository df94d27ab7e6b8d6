"""Compiling kernels ahead of time, timing and tuning them; nothing here is used while serving."""
