"""A complete run of `slipway eval`: the options, and the result as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from appliance.bench.run import Progress, first_model, make_client
from appliance.config.sections.evaluation import EvaluationTask
from appliance.evaluation.client import Endpoint
from appliance.evaluation.run import Record, run_task
from appliance.evaluation.samples import read_samples
from appliance.evaluation.summary import summarize


@dataclass(frozen=True)
class Options:
    """Options of a run."""

    url: str
    tasks: Mapping[str, EvaluationTask]
    """Tasks by name, with complete paths."""
    model: str | None = None
    """Name of the model. With None, the first name in the list of the endpoint is used."""
    limit: int | None = None
    """Maximum samples of each task. The limit of the task applies too."""
    concurrency: int = 8
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are added to each body."""
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Result:
    values: dict[str, Any]
    """The result as JSON values, without single replies."""
    records: dict[str, list[Record]]
    """All samples of each task, in the order of its file."""


async def evaluate(options: Options, report: Progress) -> Result:
    """Run all tasks, one after another. Raises SampleError and EndpointError before the first sample of a task."""
    samples = {
        name: read_samples(task, _limit(options.limit, task.limit), options.seed)
        for name, task in options.tasks.items()
    }
    started, tasks, records = datetime.now(UTC), dict[str, Any](), dict[str, list[Record]]()
    async with make_client(options.url, options.api_key, options.timeout_s) as client:
        model = options.model if options.model is not None else await first_model(client)
        endpoint = Endpoint(client, model, options.seed, options.extra)
        for name, task in options.tasks.items():
            measured = await run_task(endpoint, name, task, samples[name], options.concurrency, report)
            settings = task.model_dump(mode="json", exclude_defaults=True, exclude={"kind", "minimum", "maximum"})
            tasks[name] = {"settings": settings, **summarize(measured, options.seed)}
            records[name] = measured.records
    values = {
        "evaluation": "slipway eval",
        "started": started.isoformat(timespec="seconds"),
        "endpoint": {"url": options.url, "model": model},
        "settings": {"limit": options.limit, "seed": options.seed, "body": dict(options.extra)},
        "tasks": tasks,
    }
    return Result(values, records)


def _limit(*limits: int | None) -> int | None:
    return min((each for each in limits if each is not None), default=None)
