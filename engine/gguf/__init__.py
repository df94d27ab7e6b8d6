"""GGUF files: what they are called, their keys and their tensors. No torch, no numpy."""
