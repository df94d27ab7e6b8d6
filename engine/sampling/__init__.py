"""From logits to tokens: the stages of `pipeline.py`, one file a stage, in the order that the API promises."""
