"""Faults made on purpose in a running appliance, and whether it does then what docs/operations.md promises."""
