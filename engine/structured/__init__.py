"""Structured output: constraints on a reply as masks of the allowed next tokens. Does not import torch."""
