"""Process supervision: run directory, Supervisor, restart monitor, signals, reload and shutdown."""
