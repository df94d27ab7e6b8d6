"""`python -m appliance` is `slipway`."""

import sys

from appliance.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
