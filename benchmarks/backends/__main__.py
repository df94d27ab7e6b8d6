"""One side's process: says "ready" when its model is loaded, then answers each job on standard input with its rate."""

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.backends import MODULES, job, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", type=name)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--most", type=int, nargs=3, required=True, help="largest batch, context, tokens of all rows")
    options = parser.parse_args()
    side, most = options.side, options.most
    module = importlib.import_module(f"benchmarks.backends.{MODULES[side.engine]}")
    measure = module.load(options.checkpoint, side.bits, side.variant, options.threads, most)
    print("ready", flush=True)
    for line in sys.stdin:
        print(measure(job(line.strip())), flush=True)


if __name__ == "__main__":
    main()
