"""Run an engine in this process and record its steps, their minimal bytes and operations, and profiler events."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from benchmarks.workload import Request
from engine.api.config import EngineConfig
from engine.api.messages import Failed, FromEngine, Output, Pooling, Sampling, Submit, Timing
from engine.core.loop import Handle, Loop, build_loop
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult
from engine.kv.layout import Layout
from engine.models.parts import MLP, Experts, Model, all_bodies, attentions
from engine.models.sources import join, mlp_linears, routed_mlps, sources
from engine.worker.build import build_worker


@dataclass(frozen=True)
class Step:
    """When a step was handed over and when its result was there, by the clock of perf_counter."""

    rows: int
    tokens: int
    started: float
    ended: float


class _TimedHandle:
    def __init__(self, handle: Handle, done: Callable[[], None]) -> None:
        self._handle, self._done = handle, done

    def result(self) -> StepResult:
        found = self._handle.result()
        self._done()
        return found


class TimedWorker:
    """A worker that records the time of each step."""

    def __init__(self, worker: Any) -> None:
        self.model: Model = worker.model
        self.layout: Layout = worker.layout
        self.blocks: int = worker.blocks
        self.snapshots: int | None = worker.snapshots
        self.weight_bytes: int = worker.weight_bytes
        self.embed_bytes: int = worker.memory_usage["embedding"]
        self.kv_bytes: int = worker.kv_bytes
        self.seconds: dict[str, float] = worker.seconds
        self.steps: list[Step] = []
        self._worker = worker

    def start(self, plan: StepPlan, masks: Masks | PendingMasks) -> _TimedHandle:
        started, counts = time.perf_counter(), [row.count for row in plan.rows]
        handle = self._worker.start(plan, masks)
        return _TimedHandle(
            handle, lambda: self.steps.append(Step(len(counts), sum(counts), started, time.perf_counter()))
        )

    def close(self) -> None:
        self._worker.close()


@dataclass
class Reply:
    tokens: int = 0
    timing: Timing | None = None


class Engine:
    """Scheduler and worker, with requests that come as token ids and go as counts."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.worker = TimedWorker(build_worker(config, lambda phase, fraction: None))
        self._messages: SimpleQueue[list[FromEngine] | Exception] = SimpleQueue()
        self._loop: Loop = build_loop(config, self.worker, self._messages.put)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._sent = 0

    def _run(self) -> None:
        try:
            self._loop.run()
        except Exception as error:
            self._messages.put(error)

    def serve(self, requests: Sequence[Request]) -> list[Reply]:
        """Wait until all requests have ended. Raise RuntimeError for a refused request, and exceptions of steps."""
        submits = []
        for request in requests:
            self._sent += 1
            sampling = Sampling(temperature=request.temperature, seed=self._sent)
            submits.append(Submit(str(self._sent), request.prompt, sampling, request.tokens, ignore_eos=True))
        replies = self._served(submits)
        wrong = [reply.tokens for reply, one in zip(replies, requests, strict=True) if reply.tokens != one.tokens]
        if wrong:
            raise RuntimeError(f"{len(wrong)} replies do not have the requested length")
        return replies

    def pool(self, prompts: Sequence[tuple[int, ...]]) -> list[Reply]:
        """Run pooling prompts until all have ended."""
        submits = []
        for ids in prompts:
            self._sent += 1
            submits.append(Submit(str(self._sent), ids, Sampling(), 0, pooling=Pooling("embed")))
        return self._served(submits)

    def _served(self, submits: Sequence[Submit]) -> list[Reply]:
        replies = {submit.id: Reply() for submit in submits}
        self._loop.post(list(submits))
        left = len(submits)
        while left:
            got = self._messages.get()
            if isinstance(got, Exception):
                raise got
            for message in got:
                if isinstance(message, Failed):
                    raise RuntimeError(f"request {message.id}: {message.message}")
                if isinstance(message, Output):
                    for delta in message.deltas:
                        reply = replies[delta.id]
                        reply.tokens += len(delta.ids)
                        reply.timing = delta.timing or reply.timing
                        left -= delta.finish is not None
        return list(replies.values())

    def close(self) -> None:
        self._loop.stop()
        self._thread.join()
        self.worker.close()


@dataclass(frozen=True)
class Costs:
    """Minimal bytes and operations of a model.

    read_bytes: weights that a step reads, without routed experts.
    kv_bytes: keys and values of a token.
    flops: operations of a token in the layers. head_flops: operations of a row in the head.
    attention_flops: operations of a token for each token that it attends to.
    expert_bytes: weights of all routed experts. A token uses the share `used_share` of them.
    """

    read_bytes: int
    kv_bytes: int
    flops: int
    head_flops: int
    attention_flops: int
    expert_bytes: int = 0
    used_share: float = 0.0

    @classmethod
    def of(cls, model: Model, layout: Layout, weight_bytes: int, embed_bytes: int | None = None) -> "Costs":
        """Build the minimal cost. embed_bytes: bytes per embedding weight if they differ from the other weights."""
        shapes = sources(model)
        embed = math.prod(shapes[f"{join(model.root, model.embed.name)}.weight"])
        elements = sum(math.prod(shape) for shape in shapes.values())
        matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
        tied = model.head is not None and model.head.tied
        added = (part.count * model.embed.hidden for part in (model.embed.positions, model.embed.segments) if part)
        looked_up = embed * (2 if model.head is not None and not tied else 1) + sum(added)
        parts = attentions(model)
        routed = [body for body in all_bodies(model) if isinstance(body, Experts)]
        experts = [body.num_experts * _elements(routed_mlps(body)[0]) for body in routed]
        taken = [body.top_k / body.routed for body in routed]
        unused = sum(count * (1 - share) for count, share in zip(experts, taken, strict=True))
        embed_bytes = round(weight_bytes * embed / elements) if embed_bytes is None else embed_bytes
        expert_bytes = round(weight_bytes * sum(experts) / elements)
        return cls(
            # an embedding that is not the head as well is looked up, not read
            read_bytes=weight_bytes - expert_bytes - (0 if tied else embed_bytes),
            kv_bytes=layout.page_bytes // layout.block_tokens * len(parts),
            flops=round(2 * (matrices - looked_up - unused)),
            head_flops=0 if model.head is None else 2 * embed,
            attention_flops=sum(4 * part.heads * part.head_dim for part in parts),
            expert_bytes=expert_bytes,
            used_share=sum(taken) / len(taken) if taken else 0.0,
        )

    def decode(self, rows: int, context: float) -> tuple[float, float]:
        """Return bytes and operations of a step with `rows` rows and this mean context.

        If each row draws k of n experts evenly, the step reads n · (1 - (1 - k/n)^rows) experts. Random weights come
        close to this.
        """
        moved = (
            self.read_bytes + self.expert_bytes * (1 - (1 - self.used_share) ** rows) + rows * context * self.kv_bytes
        )
        return moved, rows * (self.flops + self.head_flops + context * self.attention_flops)

    def prefill(self, tokens: int) -> float:
        return tokens * (self.flops + (tokens + 1) / 2 * self.attention_flops) + self.head_flops


def _elements(mlp: MLP) -> int:
    return sum(row.units * row.width * linear.inputs for linear in mlp_linears(mlp) for row in linear.rows)


def pooled_flops(costs: Costs, lengths: Sequence[int]) -> int:
    """Return the attention operations of prompts with full self-attention."""
    return sum(length * (costs.flops + length * costs.attention_flops) for length in lengths)


def decoding(steps: Sequence[Step], rows: int) -> list[int]:
    """Return the indices of steps in which `rows` rows got one token each, in this step and in the previous one."""
    alone = [step.rows == step.tokens == rows for step in steps]
    return [at for at in range(1, len(steps)) if alone[at] and alone[at - 1]]


def profiled(
    events: Sequence[tuple[str, float, float]], window: tuple[float, float], steps: int, step_us: float
) -> dict[str, Any]:
    """Summarize profiler events.

    events: (name, start, end) on the device in microseconds. window: duration of the steps, counted back from the end
    of the last event. step_us: time of a step without the profiler, which slows the host but not the device.
    """
    if not events:
        raise RuntimeError("the profiler recorded nothing on the device")
    last = max(end for _, _, end in events)
    inside = sorted(event for event in events if window[0] < event[2] - last <= window[1])
    inside.sort(key=lambda event: event[1])
    busy, reached = 0.0, last + window[0]
    by_name: dict[str, list[float]] = {}
    for name, start, end in inside:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        by_name.setdefault(name, []).append(end - start)
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:30]
    return {
        "busy_us": busy / steps,
        "gap_us": step_us - busy / steps,
        "launches": len(inside) / steps,
        "kernels": [
            {"name": name[:100], "us": sum(times) / steps, "launches": len(times) / steps} for name, times in most
        ],
    }
