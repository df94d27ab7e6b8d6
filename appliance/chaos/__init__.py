"""Fault injection into a running appliance, with checks of the behaviour that docs/operations.md promises."""
