"""Deployment plan of a manifest, a checkpoint and a machine, made before any process starts, and its presentation."""
