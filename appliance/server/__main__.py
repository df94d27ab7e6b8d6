"""`python -m appliance.server CONFIG.json`."""

import sys

from appliance.server.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
