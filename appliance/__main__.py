"""`python -m appliance` is the same as `slipway`."""

import sys

from appliance.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
