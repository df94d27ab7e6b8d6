"""Mixtures of experts: the choice of experts for each token, their matrix products, and the weighted sum."""
