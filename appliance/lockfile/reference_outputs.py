"""Reference outputs of a lock file, computed by an engine of the plan in a separate process that serves no requests."""

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from appliance.config.environment import environment
from appliance.planning.plan import Plan
from engine.api.config import EngineConfig, with_values, write_config
from engine.api.golden import Recorded

RECORDING_S = 3600.0  # generous time budget, because no service waits for it


def record(plan: Plan, *, locked: Recorded | None = None) -> tuple[Recorded | None, str]:
    """Compute the reference outputs with an engine of the plan, for the prompts of `locked` if given.

    Return None and the reason if there are none.
    """
    engine = plan.engines[0]
    if not engine.lifecycle.self_test.prompts:
        return None, "lifecycle.self_test.prompts is 0"
    if plan.machine.described:
        return None, f"they must be computed on {plan.machine.described}, which is not this machine"
    test = msgspec.structs.replace(engine.lifecycle.self_test, locked=locked, refuses=False, budget=RECORDING_S)
    return _computed(with_values(engine, {"lifecycle.self_test": test, "record": None}))


def _computed(config: EngineConfig) -> tuple[Recorded | None, str]:
    print(
        f"computing {config.lifecycle.self_test.prompts} golden prompts with {config.hardware.kernels} kernels …",
        file=sys.stderr,
    )
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(config.hardware.threads)
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "golden.json")
        write_config(config, file)
        command = [sys.executable, "-P", "-m", "engine.golden", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env={**environment(), **threads}, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2] or f"the engine exited with code {done.returncode}"
        return None, last
    found = msgspec.json.decode(done.stdout, type=Recorded)
    return (found, "") if found.goldens else (None, "no prompt has finite logits and fits into max_context")
