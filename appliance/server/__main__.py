"""`python -m appliance.server CONFIG.json`."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # until the server listens: imports create no garbage, and collections take a tenth of their time
    from appliance.server.process import main

    sys.exit(main(sys.argv[1:]))
