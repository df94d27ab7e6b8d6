"""Version of Slipway, as `slipway --version` prints it; pyproject.toml states the same."""

__version__ = "0.1.0"
