"""Reader of GGUF files: keys and tensors, without torch and numpy."""
