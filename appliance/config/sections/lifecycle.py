"""Start, self-test, restart and shutdown: `health` and `lifecycle`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from appliance.config.key import ENGINE, GATEWAY, LIVE, SERVICE, Effect, Note, declare
from appliance.config.sections.values import Auto, Bytes, Seconds, SecondsOrAuto, Section


class Health(Section):
    startup_budget: Seconds = declare(1800.0, effect=SERVICE, aliases={"synonyms": "startup_timeout"}, example="1h")
    """Time from the start until the engine must be ready; the appliance exits beyond it."""
    stalled_loading: Seconds = declare(300.0, effect=SERVICE, example="15m")
    """Time without progress during a start after which an engine is killed and restarted; 0s disables it."""
    stalled_testing: Seconds = declare(120.0, effect=SERVICE, example="5m")
    """Time without a finished step in the self-test after which an engine is killed; 0s disables it."""
    stalled_busy: Seconds = declare(20.0, effect=SERVICE, example="5m")
    """Step time, and five times the longest or slowest planned step, after which an engine is killed; 0s: never."""
    stalled_idle: Seconds = declare(30.0, effect=SERVICE, example="3m")
    """Time without a computed probe (three are due in it) after which an idle engine is killed; 0s disables it."""
    stalled_gateway: Seconds = declare(20.0, effect=SERVICE, example="1m")
    """Time without an answer to the monitor after which the gateway is killed and restarted; 0s disables it."""


def _halt(value: Any) -> Any:
    """Accept the name that `halt` had before."""
    return "halt" if value == "park" else value


class Restart(Section):
    max: Annotated[int, Field(ge=0)] = declare(5, effect=SERVICE, example=3)
    """Permitted restarts of one engine within the window; the appliance exits beyond it."""
    window: Seconds = declare(600.0, effect=SERVICE, example="5m")
    """Period in which restarts are counted."""
    backoff: Seconds = declare(1.0, effect=SERVICE, example="2s")
    """Delay of the second restart within the window, doubled for each further one; the first has no delay."""
    longest_backoff: Seconds = declare(30.0, effect=SERVICE, example="1m")
    """Maximum delay of a restart."""
    exhausted: Annotated[Literal["exit", "halt"], BeforeValidator(_halt)] = declare("exit", effect=SERVICE)
    """If restarts cannot help: exit, or halt: stop the engines and report the reason at /ready until SIGTERM."""
    hold: Seconds = declare(
        10.0,
        effect=LIVE,
        clients=Note("new requests wait for a crashed engine for another time"),
        examples=("0s", "30s"),
    )
    """New requests wait for a restarting engine if its last start took at most this long; open ones always wait."""


class Journal(Section):
    # the gateway holds its file open and locked
    folder: str | None = declare(
        None,
        effect=GATEWAY,
        clients=Note("responses and replies with an Idempotency-Key are stored elsewhere or not at all"),
        is_path=True,
        example="/var/lib/slipway/journal",
    )
    """Folder of stored replies and responses; default: the run directory, which is deleted at the end."""
    keep: Seconds = declare(
        900.0,
        effect=LIVE,
        affects="gateway.journal",
        clients=Note("replies with an Idempotency-Key are kept for another time"),
        example="1h",
    )
    """Retention of such a reply after its end or the last request for it; 0s keeps none."""
    size: Bytes = declare(64 * 2**20, effect=LIVE, example="256MiB")
    """Maximum bytes of all such replies; the oldest are deleted first. The file has at most about twice the size."""
    linger: Seconds = declare(
        60.0,
        effect=LIVE,
        clients=Note("requests with an Idempotency-Key continue without their client for another time"),
        example="5m",
    )
    """Time that such a request continues after its client disconnects; a later request resumes it."""


class SelfTest(Section):
    prompts: Annotated[int, Field(ge=0, le=16)] = declare(4, effect=Effect("engine", memory=True), example=8)
    """Number of golden prompts that `slipway lock` records and the self-test computes; 0 disables the self-test."""
    at_start: bool = declare(True, effect=ENGINE, target="engine.lifecycle.self_test.at_start")
    """Compute them before an engine serves; the appliance exits if they differ from the lock."""
    every: Seconds = declare(300.0, effect=ENGINE, target="engine.lifecycle.self_test.every", examples=("1m", "0s"))
    """Interval at which an idle engine computes one of them; the engine is replaced if it differs. 0s disables it."""
    budget: Annotated[Seconds, Field(gt=0)] = declare(
        10.0, effect=ENGINE, target="engine.lifecycle.self_test.budget", example="30s"
    )
    """Time limit at a start; the remaining ones are computed when idle."""
    tolerance: Annotated[float, Field(ge=0, le=1)] | Auto = declare("auto", effect=ENGINE, example=0.05)
    """Permitted difference, as a share of the logits' standard deviation, if results are not bit-identical; auto: by
    number format."""


class CrashBundles(Section):
    folder: str | None = declare(None, effect=SERVICE, is_path=True, example="/var/lib/slipway/crashes")
    """Folder of the bundles; default: slipway-crashes-UID in $XDG_RUNTIME_DIR or the temporary directory."""
    keep: Annotated[int, Field(ge=0)] = declare(10, effect=SERVICE, example=50)
    """Maximum number of bundles, the newest ones; 0 writes none."""
    size: Bytes = declare(16 * 2**20, effect=SERVICE, example="64MiB")
    """Maximum bytes of all bundles; the oldest are deleted first."""


class Lifecycle(Section):
    # Supervisor waits for the same time
    drain: SecondsOrAuto = declare(
        "auto",
        effect=SERVICE,
        target="gateway.drain_s",
        aliases={"synonyms": ("graceful_shutdown", "shutdown_timeout")},
        example="25s",
    )
    """Time for open requests to finish after SIGTERM; auto: the platform's grace period, less 2 s."""
    linger: SecondsOrAuto = declare("auto", effect=LIVE, target="gateway.drain_linger_s", example="3s")
    """Time in the drain in which new requests are accepted; auto: 5s with a load balancer, otherwise 0s."""
    restart: Restart = Restart()
    """Restarts of crashed programs."""
    crash_bundles: CrashBundles = CrashBundles()
    """Folders with the cause of an engine crash: log lines, configuration, open requests, memory, device."""
    self_test: SelfTest = SelfTest()
    """Golden prompts, which detect wrong results of an engine."""
    journal: Journal = Journal()
    """Replies to requests with an Idempotency-Key, which survive disconnects and restarts of the gateway."""
    chaos: Literal["refused", "allowed"] = declare("refused", effect=LIVE)
    """Permit `slipway chaos` to inject faults into the running appliance, to test its recovery."""
