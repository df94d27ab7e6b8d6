import sys

from benchmarks.kernels.bench import main

if __name__ == "__main__":
    sys.exit(main())
