"""What would have been: recorded traffic under other settings, with step times fitted to the recorded ones."""
