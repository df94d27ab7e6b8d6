"""Pooling requests: their prompts for the engine, and the processing of the pooled vectors."""
