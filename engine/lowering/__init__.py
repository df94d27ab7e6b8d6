"""Lowering of a declared model to a flat list of operations, which all executors run and all plans read."""
