"""Chat templates of checkpoints, rendered in processes with limits."""
