"""From logits to a drawn token: masks, penalties, cuts, noise, logprobs."""
