"""Simulate recorded traffic with other settings, with step times fitted to the recorded ones."""
