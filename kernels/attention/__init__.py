"""Attention over paged keys and values, and without pages."""
