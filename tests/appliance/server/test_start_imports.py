"""Tests of the imports of programs and commands. Each module in the lists takes up to a second of CPU time."""

import subprocess
import sys

import pytest

HEAVY = {
    "appliance.server.process": ("torch", "numpy", "httpx", "soundfile", "appliance.config.manifest"),
    "appliance.supervisor.launch": (
        "torch",
        "numpy",
        "engine.models",
        "appliance.config.manifest",
        "appliance.planning",
    ),
    "appliance.supervisor.monitor": ("pydantic", "yaml", "asyncio"),
    "appliance.supervisor.reaper": ("pydantic", "yaml", "asyncio"),
    "appliance.cli.reload": ("pydantic", "yaml", "fastapi", "appliance.planning"),
    "appliance.cli.chaos": ("fastapi", "appliance.planning", "appliance.config.manifest"),
}


@pytest.mark.parametrize("module", HEAVY)
def test_program_starts_without_modules_that_it_may_not_need(module: str) -> None:
    listed = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & set(HEAVY[module])


def test_gateway_collects_garbage_once_it_listens() -> None:
    """Collections are off only while it imports."""
    program = (
        "import gc, runpy, sys\n"
        "import appliance.server.process as process\n"
        "process.main = lambda given: print(gc.isenabled()) or 0\n"
        "sys.argv = ['gateway', 'config.json']\n"
        "try:\n"
        "    runpy.run_module('appliance.server', run_name='__main__')\n"
        "except SystemExit:\n"
        "    pass\n"
        "process.collect_garbage()\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 1000)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
