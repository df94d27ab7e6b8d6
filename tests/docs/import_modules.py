"""`python -m tests.docs.import_modules MODULE …`: import modules. A warning is an error."""

import importlib
import sys
import warnings

if __name__ == "__main__":
    warnings.simplefilter("error")
    for module in sys.argv[1:]:
        importlib.import_module(module)
