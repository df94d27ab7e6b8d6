"""Of what a manifest is composed: files that extend others, overlays, variables, profiles of hardware."""
