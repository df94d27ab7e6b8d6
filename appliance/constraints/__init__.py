"""Which choices go together: declared rules, and the solver that resolves `auto` by them."""
