"""Trains, writes and measures the demo model of `manifests/demo`.

    python tools/train_demo.py --out manifests/demo --minutes 45  # train for a time (or --steps N), then write
    python tools/train_demo.py --evaluate manifests/demo          # greedy answers to held-out prompts, as a table

Seeded: the same seed, steps and workers give the same run, up to the rounding of the machine's kernels.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Activations are large and short-lived: without these, glibc hands them back to the kernel each time, and half of
# the time of a training step goes into page faults. Read at the start of a process, so they count for the workers.
MALLOC = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {"hugetlb": 1, "mmap_max": 0, "trim_threshold": 10**11, "top_pad": 2**28}.items()
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder that receives the model")
    parser.add_argument(
        "--evaluate", type=Path, metavar="FOLDER", help="measure a written model instead of training one"
    )
    parser.add_argument("--count", type=int, default=100, help="held-out prompts of each skill (default 100)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="length of the training (default 45)")
    length.add_argument("--steps", type=int, help="length of the training in optimizer steps")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--workers", type=int, default=2, help="processes, one thread each; they share each step (CPU only, default 2)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path(tempfile.gettempdir()) / "slipway-demo",
        help="folder for training states",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the state in the folder of checkpoints")
    arguments = parser.parse_args()
    if (arguments.out is None) == (arguments.evaluate is None):
        parser.error("one of --out and --evaluate is needed")
    return arguments


def main() -> None:
    arguments = _arguments()
    if arguments.evaluate:
        from tools.demo.measure import print_table

        print_table(arguments.evaluate, arguments.count)
        return
    import torch

    from tools.demo.training import Run, train
    from tools.demo.written import write_tokenizer

    began = time.time()
    arguments.checkpoints.mkdir(parents=True, exist_ok=True)
    (arguments.checkpoints / "store").unlink(missing_ok=True)  # where the workers of an earlier run met
    if not arguments.resume:
        write_tokenizer(arguments.checkpoints, arguments.seed)
    minutes = None if arguments.steps else arguments.minutes or 45.0
    workers = 1 if arguments.device == "cuda" else arguments.workers
    run = Run(
        arguments.checkpoints, arguments.seed, arguments.steps, minutes, arguments.device, workers, arguments.resume
    )
    os.environ["GLIBC_TUNABLES"] = MALLOC
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.multiprocessing.spawn(train, (run,), nprocs=workers)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for file in arguments.checkpoints.glob("*.*"):
        if file.suffix in (".json", ".safetensors"):
            shutil.copy(file, arguments.out / file.name)
    print(f"{arguments.out}: written after {(time.time() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
