"""Sampling: the stages of `pipeline.py`, one file per stage, applied in the order that the API documents."""
