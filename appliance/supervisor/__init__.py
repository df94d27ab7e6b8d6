"""A plan as a process tree: run directory, Supervisor, sentinel, signals, the end."""
