"""Attention over paged keys and values, and over keys and values without pages."""
