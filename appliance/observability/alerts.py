"""Alerts for Prometheus, each with the actions of an operator (docs/alerts.md).

Thresholds that follow from the manifest are fields of Thresholds, so that an alert fires before the service reaches its
own limit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from appliance.observability.rules import Objectives, slow_share

JOB = "slipway"
"""Name of the scrape job."""


@dataclass(frozen=True)
class Thresholds:
    """Values of the manifest that alerts compare with. Times are in seconds."""

    restarts: int = 5
    """lifecycle.restart.max"""
    window_s: float = 600
    """lifecycle.restart.window"""
    startup_s: float = 1800
    """health.startup_budget"""
    waiting: int = 1024
    """limits.max_waiting"""
    objectives: Objectives = Objectives()


@dataclass(frozen=True)
class Alert:
    """An alert. `expr` has one series for each service or engine that is affected."""

    name: str
    severity: Literal["critical", "warning"]
    """critical: clients are affected now, so call someone. warning: a task for the next working day."""
    lasting: str
    """Time for which the expression must hold, as Prometheus writes it."""
    summary: str
    """One sentence with labels of the series in Prometheus' templates."""
    meaning: str
    actions: tuple[str, ...]
    """Actions of an operator, in order."""
    expr: Callable[[Thresholds], str]


def _engine(text: str) -> str:
    return f"Engine {{{{ $labels.engine }}}} of {{{{ $labels.instance }}}} {text}"


def _service(text: str) -> str:
    return f"{{{{ $labels.instance }}}} {text}"


def duration(seconds: float) -> str:
    """Return a time of at least a second, as Prometheus writes it."""
    return f"{max(round(seconds), 1)}s"


def _half_of_restarts(limits: Thresholds) -> str:
    # increase() extrapolates to the edges of its period, so the number is compared with half a restart less.
    count = max(limits.restarts / 2, 1) - 0.5
    restarts = f"increase(slipway_engine_restarts_total[{duration(limits.window_s)}])"
    return f"sum by (job, instance, engine) ({restarts}) > {count:g}"


def _burn(name: str, limits: Thresholds) -> str:
    """Return an expression for the two burn rates of the SRE workbook, chapter 5: 2 % of a month's budget in an hour,
    or 5 % in six hours."""
    budget = limits.objectives.budget
    pairs = (("1h", "5m", 14.4), ("6h", "30m", 6.0))
    return " or ".join(
        f"({slow_share(name, long)} > {budget * rate:.6g} and {slow_share(name, short)} > {budget * rate:.6g})"
        for long, short, rate in pairs
    )


def _certificate(days: int) -> Callable[[Thresholds], str]:
    end = "slipway_tls_certificate_end_seconds"
    return lambda limits: f"({end} > 0) - time() < {days} * 86400"


_LOGS = "Read the log lines of the affected program; the launcher prints the cause of each exit."
_WHY = "`slipway why ID` prints the timeline of one slow request with causes."

_AVAILABILITY = (
    Alert(
        "SlipwayDown",
        "critical",
        "2m",
        _service("cannot be scraped."),
        "The service does not answer: it has exited, its machine is gone, or the network is interrupted.",
        (
            "Look at the container or unit: `kubectl describe pod`, `docker ps -a` or `systemctl status`.",
            "Read the exit code and its JSON line on standard error or in the termination message; "
            "`slipway explain CODE` prints the cure.",
            "If the process runs, call `/live` on the machine itself to tell the service from the network.",
        ),
        lambda limits: f'up{{job="{JOB}"}} == 0',
    ),
    Alert(
        "SlipwayNotReady",
        "critical",
        "2m",
        _service("has had no engine for longer than a start may take."),
        "All engines are down for longer than `health.startup_budget`, or the service is halted after a failure.",
        (
            "Call `/ready`: it names the phase of each engine, or the reason of a failure.",
            "With the status `failed` fix the reason (`slipway explain CODE`) and start the service again.",
            "A phase that does not advance: look at the download, the disk and the memory of the machine.",
        ),
        lambda limits: (
            f"max by (job, instance) (max_over_time(slipway_engine_up[{duration(limits.startup_s)}])) == 0"
            ' or max by (job, instance) (slipway_phase{phase="failed"}) == 1'
        ),
    ),
    Alert(
        "SlipwayEngineCrashLoop",
        "critical",
        "0m",
        _engine("has used half of its restarts."),
        "The engine crashes repeatedly. Beyond `lifecycle.restart.max` within `lifecycle.restart.window` the service "
        "exits with code 14.",
        (
            "Find the newest crash bundle, which the log names; `death.json` has the cause.",
            "`slipway explain CAUSE` prints the cure: more memory for `oom-kill`, another GPU for `device-error`.",
            "If a request causes the crashes, group testing isolates it; `SlipwayRequestsIsolated` then fires too.",
            "After a deployment: go back to the previous image and manifest.",
        ),
        _half_of_restarts,
    ),
    Alert(
        "SlipwayEngineDown",
        "warning",
        "10m",
        _engine("is down, and other engines serve."),
        "The service has less capacity; requests continue on the other engines.",
        (_LOGS, "If it does not return, `slipway reload --restart` replaces the engines one after another."),
        lambda limits: (
            "slipway_engine_up == 0 and on (job, instance) (max by (job, instance) (slipway_engine_up) == 1)"
        ),
    ),
    Alert(
        "SlipwayRequestsHeld",
        "warning",
        "5m",
        _service("has requests that wait for an engine to restart."),
        "Clients with open requests notice a pause that does not end.",
        ("Follow the actions of `SlipwayNotReady`.",),
        lambda limits: "slipway_requests_held > 0",
    ),
)

_LOAD = (
    Alert(
        "SlipwayQueueGrowing",
        "warning",
        "5m",
        _service("has a queue that grows: {{ $value }} requests wait."),
        "More requests arrive than the engines finish. At `limits.max_waiting` requests are refused with 503.",
        (
            "Compare the rate of requests with yesterday; find the API key with the most tokens "
            "(`slipway_key_tokens_total`) and limit it with `tokens_per_minute`.",
            "Add a replica, or `slipway whatif` with a recording to find a better setting.",
            _WHY,
        ),
        lambda limits: (
            f"service:slipway_requests_waiting:sum > {max(limits.waiting / 4, 1):g}"
            " and deriv(service:slipway_requests_waiting:sum[10m]) > 0"
        ),
    ),
    Alert(
        "SlipwayRequestsRefused",
        "critical",
        "5m",
        _service("refuses requests: {{ $value }} per second get 503."),
        "The queue has reached a limit, or deadlines cannot be met. Clients get 503 with Retry-After.",
        (
            "Add a replica, or send less traffic: limit the busiest API key, and stop batch jobs.",
            "Do not raise `limits.max_waiting` at first: a longer queue makes every request slower.",
        ),
        lambda limits: "sum by (job, instance) (rate(slipway_admission_rejections_total[5m])) > 0.1",
    ),
    Alert(
        "SlipwayKvCacheFull",
        "warning",
        "10m",
        _engine("has a full KV cache and preempts requests."),
        "Running requests lose their KV blocks and are computed again, which costs throughput and latency.",
        (
            "`slipway plan MANIFEST` shows the size of the cache and how many contexts it holds.",
            "Lower `engine.scheduling.max_running` or `limits.max_output_tokens`, or give the cache more memory: "
            "`hardware.memory_share`, `quantization.kv_cache`.",
        ),
        lambda limits: (
            "slipway_kv_cache_usage_ratio > 0.95"
            " and on (job, instance, engine) rate(slipway_preemptions_total[10m]) > 0"
        ),
    ),
    Alert(
        "SlipwayFirstTokenSlow",
        "critical",
        "2m",
        _service("spends its error budget for the time to the first token too fast."),
        "The share of requests above the objective would use a month's budget within days.",
        (
            "If requests wait (`slipway_requests_waiting`), follow the actions of `SlipwayQueueGrowing`.",
            "If they do not, look for long prompts (`slipway_request_prompt_tokens`) and a lower rate of prefix cache "
            "hits.",
            _WHY,
        ),
        lambda limits: _burn("time_to_first_token", limits),
    ),
    Alert(
        "SlipwayTokensSlow",
        "critical",
        "2m",
        _service("spends its error budget for the time between tokens too fast."),
        "Streams are slower than the objective.",
        (
            "Compare `slipway_requests_running` with yesterday: more concurrent requests make each of them slower.",
            "On a CPU look for other processes on its cores (`slipway plan` names them), on a GPU for throttling.",
            _WHY,
        ),
        lambda limits: _burn("inter_token_latency", limits),
    ),
)

_CORRECTNESS = (
    Alert(
        "SlipwayErrors",
        "critical",
        "5m",
        _service("answers {{ $value | humanizePercentage }} of its requests with a 5xx status."),
        "Requests fail for a reason of the service. Replies with 503 of a full queue count too.",
        (
            "If `SlipwayRequestsRefused` or `SlipwayNotReady` fires too, follow its actions first.",
            "Find the failing route by the label `handler` of `http_requests_total`, and read its log lines.",
        ),
        lambda limits: "service:http_errors:ratio_rate5m > 0.05",
    ),
    Alert(
        "SlipwayRequestsIsolated",
        "warning",
        "0m",
        _service("has isolated a request that crashes engines."),
        "Group testing found a request that crashes engines; the same content now gets 422 for an hour.",
        (
            "The log line of the isolation has the `request_id` and the API key of the sender.",
            "Report the crash bundle; it contains the tokens of the request.",
        ),
        lambda limits: "increase(slipway_requests_quarantined_total[1h]) > 0",
    ),
    Alert(
        "SlipwaySelfTestFailed",
        "critical",
        "0m",
        _engine("computed wrong results for a golden prompt."),
        "Weights in memory or the device are damaged, or a library has changed. The engine was replaced.",
        (
            "The last log line of the engine has the prompt and both results; `slipway explain drift` prints the cure.",
            "If it recurs, stop the service on this machine and test its memory and GPU.",
        ),
        lambda limits: "increase(slipway_self_test_failures_total[1h]) > 0 or slipway_self_test_last_result == 0",
    ),
    Alert(
        "SlipwayJournalErrors",
        "warning",
        "0m",
        _service("cannot write its journal of durable replies."),
        "Streams continue, but replies cannot be resumed after a restart of the gateway.",
        ("Free space on the volume of `lifecycle.journal.folder`; the service then rewrites all known replies.",),
        lambda limits: "increase(slipway_journal_errors_total[10m]) > 0",
    ),
    Alert(
        "SlipwayCertificateExpiring",
        "warning",
        "1h",
        _service("has a certificate that expires within a week."),
        "The file of `endpoints.tls.certificate` was not renewed. A renewed file applies without a reload.",
        ("Find out why the renewal failed (cert-manager, ACME client), and renew the certificate.",),
        _certificate(7),
    ),
    Alert(
        "SlipwayCertificateExpired",
        "critical",
        "0m",
        _service("has a certificate that has expired or expires within a day."),
        "Clients refuse the connection after the expiry. The service continues to use the certificate.",
        (
            "Write a valid certificate and its key to the files of `endpoints.tls`; they are read within 5 seconds.",
            "If the files are new already, the log names the reason why they were refused.",
        ),
        _certificate(1),
    ),
)

ALERTS = (*_AVAILABILITY, *_LOAD, *_CORRECTNESS)
