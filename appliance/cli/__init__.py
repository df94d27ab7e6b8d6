"""The command line: `slipway` and what its commands print."""
