"""Manifest loading: YAML with source locations, layers with precedence, validation, and suggestions for mistakes."""
