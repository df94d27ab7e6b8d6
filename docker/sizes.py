"""Print the bytes of the packages for GPUs in an environment as JSON: `sizes.py SITE_PACKAGES`.

docker/cuda-sizes.json has the output for the environment that `requirements/install.py runtime` makes with torch for
CUDA on x86-64, after `docker/prune.py`. A test compares its versions with the lock files and its sum with the limit of
the image. `others` are all packages besides, without Slipway.
"""

import json
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

GPU = ("torch", "triton", "nvidia-", "cuda-")
"""Beginnings of the names of packages that only an image for GPUs has, and torch."""
EVERYWHERE = "nvidia-ml-py"


def size(one: Distribution) -> int:
    """Return the bytes of the files of a distribution that are there."""
    paths = [Path(str(one.locate_file(file))) for file in one.files or ()]
    return sum(path.stat().st_size for path in paths if path.is_file())


def sizes(site: Path) -> dict[str, int]:
    """Return the bytes of each package for GPUs by name==version, and of all others together."""
    found: dict[str, int] = {}
    others = 0
    for one in distributions(path=[str(site)]):
        name = one.metadata["Name"].lower().replace("_", "-")
        if name.startswith(GPU) and name != EVERYWHERE:
            found[f"{name}=={one.version.partition('+')[0]}"] = size(one)
        elif not name.startswith("slipway"):
            others += size(one)
    return {**dict(sorted(found.items())), "others": others}


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or not Path(arguments[0], "torch").is_dir():
        raise SystemExit("usage: sizes.py SITE_PACKAGES (the folder that contains torch)")
    print(json.dumps(sizes(Path(arguments[0])), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
