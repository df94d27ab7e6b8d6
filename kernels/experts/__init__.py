"""Mixtures of experts: which experts a token takes, their matrix products, and the weighted sum of what they give."""
