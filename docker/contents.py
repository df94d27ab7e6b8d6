"""Print the size of each part of the image in megabytes (10^6 bytes): `contents.py [ROOT]`.

ROOT is / by default. `docker/test_image.sh` runs this file inside the image, which has no du.
"""

import os
import stat
import sys
from collections import Counter
from fnmatch import fnmatchcase

SITE = "opt/slipway/venv/lib/python3*/site-packages"
# The first pattern that a path has counts.
PARTS = (
    ("torch: operators and MKL (libtorch_cpu.so)", f"{SITE}/torch/lib/libtorch_cpu.so"),
    ("torch: bindings and Python modules", f"{SITE}/torch*/*"),
    ("FFmpeg with PyAV: videos and audio", f"{SITE}/av*/*"),
    ("Pillow: images", f"{SITE}/PIL/*"),
    ("Pillow: images", f"{SITE}/pillow*/*"),
    ("libsndfile, soxr: audio", f"{SITE}/*sound*"),
    ("libsndfile, soxr: audio", f"{SITE}/soxr*/*"),
    ("numpy", f"{SITE}/numpy*/*"),
    ("tokenizers, sentencepiece, tiktoken, llguidance", f"{SITE}/tokenizers*/*"),
    ("tokenizers, sentencepiece, tiktoken, llguidance", f"{SITE}/sentencepiece*/*"),
    ("tokenizers, sentencepiece, tiktoken, llguidance", f"{SITE}/tiktoken*/*"),
    ("tokenizers, sentencepiece, tiktoken, llguidance", f"{SITE}/llguidance*/*"),
    ("triton, CUDA and ROCm libraries", f"{SITE}/nvidia/*"),
    ("triton, CUDA and ROCm libraries", f"{SITE}/triton/*"),
    ("obstore: buckets", f"{SITE}/obstore*/*"),
    ("cryptography", f"{SITE}/cryptography*/*"),
    ("pip, for model.source.pypi", f"{SITE}/pip*/*"),
    ("Slipway: demo model", f"{SITE}/appliance/demo/*"),
    ("Slipway: compiled kernels of CPUs", f"{SITE}/kernels/cpu/*.so"),
    ("Slipway: compiled kernels of GPUs", "opt/slipway/compiled/*"),
    ("Slipway: Python modules, page, manifests", f"{SITE}/appliance/*"),
    ("Slipway: Python modules, page, manifests", f"{SITE}/engine/*"),
    ("Slipway: Python modules, page, manifests", f"{SITE}/kernels/*"),
    ("Slipway: Python modules, page, manifests", "opt/slipway/manifests/*"),
    ("other Python packages", "opt/slipway/*"),
    ("system: Python", "usr/lib/python3*"),
    ("system: Python", "usr/local/*"),
    ("system: Python", "usr/bin/python*"),
    ("system: libraries, shell, certificates, time zones", "*"),
)


def sizes(root: str) -> Counter[str]:
    """Return the bytes of each part. A file with several names counts once."""
    found: Counter[str] = Counter()
    seen: set[tuple[int, int]] = set()
    device = os.stat(root).st_dev
    for folder, folders, names in os.walk(root):
        # Mounts such as /proc are not part of the image.
        folders[:] = [name for name in folders if os.lstat(os.path.join(folder, name)).st_dev == device]
        for name in names:
            path = os.path.join(folder, name)
            about = os.lstat(path)
            if not stat.S_ISREG(about.st_mode) or (about.st_dev, about.st_ino) in seen or about.st_dev != device:
                continue
            seen.add((about.st_dev, about.st_ino))
            inner = os.path.relpath(path, root)
            found[next(part for part, pattern in PARTS if fnmatchcase(inner, pattern))] += about.st_size
    return found


def main(root: str = "/") -> None:
    found = sizes(root)
    for part, count in found.most_common():
        print(f"contents: {count / 1e6:7.1f} MB  {part}")
    print(f"contents: {sum(found.values()) / 1e6:7.1f} MB  in all")


if __name__ == "__main__":
    main(*sys.argv[1:])
