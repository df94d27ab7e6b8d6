"""Durable replies on disk for requests with an Idempotency-Key. They survive the connection and the gateway process."""
