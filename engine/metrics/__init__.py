"""Metrics: their declarations, and their values as numbers."""
