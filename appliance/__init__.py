"""The appliance: manifest in, supervised service out. Never imports torch; it survives the engine and restarts it."""

from appliance.config.version import __version__ as __version__
