"""Writes requirements/{runtime,test}.txt: the exact versions installed now of everything the project needs.

    python tools/lock.py            # in an environment where the test suite passes

torch is pinned to the release without its build suffix, so that each machine takes the build that fits it. triton is
pinned for the tests alone: when it serves, a torch build for GPUs says which one it wants, within the range of
pyproject.toml.
"""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
UNPINNED = re.compile(r"nvidia-.*|cuda-.*|slipway")


def closure(wanted: list[str]) -> dict[str, str]:
    """Installed versions of these requirements and of all that they need, by normalised name."""
    found: dict[str, str] = {}
    queue = [Requirement(text) for text in wanted]
    while queue:
        requirement = queue.pop()
        extras = requirement.extras or {""}
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        try:
            package = distribution(name)
        except PackageNotFoundError as error:
            raise SystemExit(f"{name} is not installed; first: pip install -e '.[test]'") from error
        if name in found and not requirement.extras:
            continue
        found[name] = package.version.split("+")[0]
        for text in package.requires or ():
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                need.marker = None
                queue.append(need)
    return found


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runtime = closure(project["dependencies"])
    test = closure(project["dependencies"] + project["optional-dependencies"]["test"])
    for name, versions, head in (
        ("runtime", runtime, ""),
        ("test", {n: v for n, v in test.items() if n not in runtime}, "-r runtime.txt\n"),
    ):
        lines = [f"{n}=={v}\n" for n, v in sorted(versions.items()) if not UNPINNED.fullmatch(n)]
        path = ROOT / "requirements" / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("# Written by tools/lock.py.\n" + head + "".join(lines))
        print(f"{path.relative_to(ROOT)}: {len(lines)} packages")


if __name__ == "__main__":
    main()
