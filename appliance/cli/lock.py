"""`slipway lock`: write the lock file of a manifest, or compare with the existing one."""

import sys
from pathlib import Path

import msgspec

from appliance.checkpoints.lockfile import Lock, as_yaml, compare, lock_path, read_lock
from appliance.config import exits
from appliance.config.problems import Problem, Refused
from appliance.config.settings import Given
from appliance.hardware.machine import Machine
from appliance.lockfile.reference_outputs import record
from appliance.lockfile.verify import LockVerifier
from appliance.lockfile.write import make_lock
from appliance.planning.memory import spell_bytes
from appliance.planning.plan import Plan
from appliance.planning.validate import resolve, resolve_downloads, validate
from engine.api.golden import Recorded


def write(given: Given, machine: Machine | None = None) -> int:
    """Hash the checkpoint and write the lock file. Raise Refused."""
    settings, _ = resolve(given, machine)
    path, key = lock_path(given.manifest), settings.manifest.model.source.key
    plan = validate(given, machine)
    settings = resolve_downloads(settings, given.environ)
    if plan.job is not None:
        message = f"its files are not downloaded yet. Run `slipway fetch {given.manifest}`, then lock again"
        raise Refused([Problem(settings.place(key), ".".join(key), message)], exits.SOURCE)
    try:
        lock, before = make_lock(plan, settings), _before(path)
        golden, why = _golden(plan, lock, before)
        lock = msgspec.structs.replace(lock, golden=golden)
        path.write_text(as_yaml(lock, str(given.manifest)))
    except OSError as error:
        message = f"cannot write the lock file: {error.filename}: {(error.strerror or str(error)).lower()}"
        raise Refused([Problem(settings.place(key), ".".join(key), message)], exits.INTEGRITY) from error
    count, size = len(lock.model.files), sum(one.size for one in lock.model.files.values())
    revision = f", revision {lock.model.revision}" if lock.model.revision else ""
    replies = f"replies have system_fingerprint {plan.gateway.system_fingerprint}"
    print(f"{path}: {count} files, {spell_bytes(size)}{revision}; {replies}")
    count = len(golden.goldens) if golden else 0
    print(f"  {count} golden prompt{'s' * (count != 1)} for the self-test of engines{f': {why}' if why else ''}")
    if before is not None:
        changes = list(compare(before.model.files, lock.model.files))
        print(
            "\n".join(f"  {one.name}: {one.message}" for one in changes)
            or "  all files are the same as in the previous lock"
        )
    return exits.OK.number


def _golden(plan: Plan, lock: Lock, before: Lock | None) -> tuple[Recorded | None, str]:
    """Return the self-test outputs computed now, or those of the previous lock if its files are the same, with a
    message."""
    found, why = record(plan)
    if found is not None:
        return found, f"with {found.arithmetic.kernels} kernels on {found.arithmetic.device}"
    if before is not None and before.golden is not None and before.model.files == lock.model.files:
        return before.golden, f"kept from the previous lock, because none can be recorded here ({why})"
    return None, f"none can be recorded here ({why})"


def _before(path: Path) -> Lock | None:
    try:
        return read_lock(path)
    except (FileNotFoundError, Refused):  # an invalid lock is replaced
        return None


def verify(given: Given, machine: Machine | None = None) -> int:
    """Compare with the lock and read every byte, regardless of model.lock; write nothing. Raise Refused."""
    guard = LockVerifier(hash_contents=True, strict=True)
    plan = validate(given, machine, verify=guard)
    print(guard.summary())
    for line in guard.notes(plan):
        print(line, file=sys.stderr)
    return exits.OK.number
