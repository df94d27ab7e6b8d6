"""Differences between two manifests: effects on the service, its memory and its clients."""
