"""The appliance: turns a manifest into a supervised service. It never imports torch, and it restarts engines that
crash."""

from appliance.config.version import __version__ as __version__
