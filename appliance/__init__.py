"""The appliance: manifest in, supervised service out. Never imports torch; it survives the engine and restarts it."""

__version__ = "0.1.0"
