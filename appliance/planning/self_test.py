"""Self-test settings of an engine, and their description in the plan."""

from appliance.config.manifest import Manifest
from appliance.config.spelling import spell
from appliance.config.version import __version__
from appliance.planning.choice import Choice
from appliance.planning.targets import passed_on
from engine.api.config import EngineConfig, SelfTest
from engine.api.golden import BANDS, Arithmetic, Recorded


def self_test(manifest: Manifest, golden: Recorded | None, *, skipped: bool) -> SelfTest:
    """Return the self-test settings. skipped: the model has no self-test prompts. Pooling models have no logits to
    compare, and speech models read audio.

    `golden` are the reference outputs of the lock file, if the lock is enforced.
    """
    wanted = manifest.lifecycle.self_test
    return SelfTest(
        **passed_on(manifest, "engine.lifecycle.self_test"),
        prompts=0 if skipped else wanted.prompts,
        tolerance=None if wanted.tolerance == "auto" else wanted.tolerance,
        locked=golden if wanted.prompts and not skipped else None,
        refuses=manifest.model.lock != "warn",
        release=__version__,
    )


def tolerance(manifest: Manifest, engine: EngineConfig) -> Choice[float]:
    wanted = manifest.lifecycle.self_test.tolerance
    if wanted != "auto":
        return Choice(wanted)
    found = Arithmetic(
        device="",
        kernels="",
        dtype=engine.model.dtype,
        kv_dtype=engine.quantization.kv_cache,
        weights=engine.quantization.weights,
        precision=engine.hardware.matmul_precision,
    ).coarseness
    reasons = {"float32": "float32 throughout", "half": "16-bit numbers", "rounded": "quantized weights or KV cache"}
    return Choice(BANDS[found], f"{reasons[found]}; identical engines agree bit for bit")


def describe_self_test(engine: EngineConfig, lock: str, *, skipped: bool) -> str:
    """Return the plan's line about the self-test. `lock` is the name of the lock file."""
    test = engine.lifecycle.self_test
    if not test.prompts:
        why = (
            "pooling models have no logits, and speech models read audio"
            if skipped
            else "lifecycle.self_test.prompts is 0"
        )
        return f"self-test: none ({why})"
    when = [
        *(["before it serves"] if test.at_start else []),
        *([f"one every {spell(test.every, 'duration')} while idle"] if test.every else []),
    ]
    prompts = f"{test.prompts} golden prompt{'s' * (test.prompts != 1)}"
    if not when:
        return f"self-test: none ({prompts}, neither at_start nor every)"
    return f"self-test: {prompts}, {' and '.join(when)}; {_against(engine, lock)}"


def _against(engine: EngineConfig, lock: str) -> str:
    locked = engine.lifecycle.self_test.locked
    if locked is None:
        return "compared with the engine's own outputs at its start, because there is no lock file"
    made = locked.arithmetic
    by = f"recorded with {made.kernels} in {made.dtype} on {made.device}"
    if made.weights != engine.quantization.weight_format:
        here = engine.quantization.weight_format
        return f"those of {lock} cannot be compared: {by}, weights {made.weights}, and here they are {here}"
    return f"compared with {lock} ({by})"
