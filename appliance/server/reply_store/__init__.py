"""Replies that outlive their connection and the gateway: what a request with an Idempotency-Key was given, on disk."""
