"""Run modules as `python -m` does, each in a forked child of one process that has imported all modules already.

Reads JSON {"imports": [module, …], "commands": [[module, argument, …], …]} from standard input. Prints JSON
{"imports": "traceback of an error or warning", "commands": [[exit code, output], …]}. A child that exits by SystemExit
or an exception behaves as the interpreter does: the message or the traceback is part of its output.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
import warnings
from typing import Any

# Imported once for all children: up to three seconds each.
SHARED = ("torch", "transformers", "engine.llm", "kernels.ops", "appliance.planning.validate", "appliance.server.app")


def run_child(argv: list[str]) -> int:
    """Run one module and return its exit code."""
    sys.argv = list(argv)
    sys.modules.pop(argv[0], None)
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run(argv: list[str]) -> tuple[int, str]:
    """Exit code and output of one module in a child process."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = run_child(argv)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode()


def import_all(modules: list[str]) -> str:
    """Import modules. A warning is an error. Return its traceback, or ""."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            for name in modules:
                importlib.import_module(name)
        except Exception:
            return traceback.format_exc()
    return ""


def main(given: Any) -> None:
    for name in SHARED:
        importlib.import_module(name)
    error = import_all(given["imports"])
    gc.freeze()  # the children need not copy the pages of objects that a collection would visit
    json.dump({"imports": error, "commands": [run(argv) for argv in given["commands"]]}, sys.stdout)


if __name__ == "__main__":
    main(json.load(sys.stdin))
