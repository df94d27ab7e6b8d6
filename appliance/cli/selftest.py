"""`slipway selftest`: compute the self-test prompts of a lock again, and report the differences of each prompt."""

import sys

from appliance.checkpoints.lockfile import lock_path
from appliance.config import exits
from appliance.config.settings import Given
from appliance.lockfile.reference_outputs import record
from appliance.lockfile.verify import LockVerifier
from appliance.planning.validate import validate
from engine.api.golden import Band, Golden, band_between, difference, distance


def selftest(given: Given) -> int:
    """Return 0 if all outputs agree, the code of a failed self-test if one differs, that of integrity without a
    comparison. Raise Refused."""
    plan = validate(given, verify=LockVerifier(hash_contents=False))
    engine, path = plan.engines[0], lock_path(given.manifest)
    locked = engine.lifecycle.self_test.locked
    if locked is None:
        print(f"{path}: has no golden prompts; `slipway lock {given.manifest}` records them", file=sys.stderr)
        return exits.INTEGRITY.number
    found, why = record(plan, locked=locked)
    if found is None:
        print(f"slipway selftest: {why}", file=sys.stderr)
        return exits.SELF_TEST.number
    band = band_between(locked.arithmetic, found.arithmetic, engine.lifecycle.self_test.tolerance)
    if band is None:
        weights = f"weights {locked.arithmetic.weights} were locked, but this plan has {found.arithmetic.weights}"
        print(f"{path}: cannot be compared: {weights}", file=sys.stderr)
        return exits.INTEGRITY.number
    made = {golden.prompt: golden for golden in found.goldens}
    print(f"{path}: tolerance: {band} ({band.why})")
    wrong = [_differs(one, made.get(one.prompt), band) for one in locked.goldens]
    return (exits.SELF_TEST if any(wrong) else exits.OK).number


def _differs(expected: Golden, found: Golden | None, band: Band) -> bool:
    """Print the result of a prompt. Return whether it failed."""
    name = f"  {expected.prompt.name:<8} {len(expected.prompt.ids):>3} tokens"
    if found is None:
        print(f"{name}  not computed: its logits are not finite, or it does not fit into model.max_context")
        return True
    same = [old.bits == new.bits for old, new in zip(expected.fingerprints, found.fingerprints, strict=True)]
    wrong = difference(expected, found, band)
    if wrong:
        print(f"{name}  DIFFERS: {wrong}")
    elif all(same):
        print(f"{name}  the same bits")
    else:
        share = distance(expected.fingerprints[0], found.fingerprints[0])
        print(f"{name}  agrees; {100 * share:.2g} % of the spread at most")
    return bool(wrong)
