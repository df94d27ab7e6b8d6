"""API keys, their limits, and TLS certificates."""
