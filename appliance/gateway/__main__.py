"""`python -m appliance.gateway CONFIG.json`."""

import sys

from appliance.gateway.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
