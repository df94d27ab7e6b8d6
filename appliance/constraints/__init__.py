"""Constraints between manifest keys: declared rules, and the solver that resolves `auto` with them."""
