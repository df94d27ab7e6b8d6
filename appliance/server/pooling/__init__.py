"""Prompts that are pooled: what goes to the engine, and what is made of its numbers."""
