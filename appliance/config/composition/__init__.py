"""Composition of a manifest: base files, overlays, variables and hardware profiles."""
