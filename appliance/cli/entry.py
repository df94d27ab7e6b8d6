"""Start of the command `slipway`: handles signals first, then imports the command line."""

import gc
import os
import sys

from appliance.cli.first_argument import names_manifest
from appliance.supervisor import signals


def main() -> int:
    """Run the command line of this process and return its exit code."""
    words = sys.argv[1:]
    first = words[0] if words else ""
    serves = first == "serve" or names_manifest(first)
    if serves or os.getpid() == 1:
        signals.exit_at_once(0 if serves else None)
    else:
        signals.unblock()
    gc.set_threshold(50_000)  # imports create no garbage; with the default of 700 collections take a tenth of the start
    from appliance.cli.main import main as run

    return run(words)


if __name__ == "__main__":
    sys.exit(main())
