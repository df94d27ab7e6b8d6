"""Sections of the manifest, one file for each part: every key with its type, default and metadata."""
