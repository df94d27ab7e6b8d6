"""Search for the settings of a manifest that serve a workload best: by simulation, then by runs (docs/tune.md)."""
