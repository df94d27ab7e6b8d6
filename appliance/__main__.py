"""`python -m appliance` is `slipway`."""

import sys

from appliance.command.entry import main

if __name__ == "__main__":
    sys.exit(main())
