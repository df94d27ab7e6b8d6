"""What a word of a manifest, of a message or of an answer stands for: `slipway explain`."""
