"""Explanations of `slipway explain`: words of a manifest, a message or a response."""
