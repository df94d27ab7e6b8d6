"""Worker of a tensor-parallel engine: the worker of rank 0 together with the other ranks."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from engine.api.config import AdapterConfig
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult
from engine.worker.adapters import AdapterStore, Done
from engine.worker.rank_messages import HandleAdapter, RegisterAdapter
from engine.worker.ranks import Ranks
from engine.worker.worker import StartedStep, Worker


class RankedAdapters:
    """The adapters of all ranks. Rank 0 reads and checks an adapter before the others read it."""

    def __init__(self, own: AdapterStore, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def read(self, adapter: AdapterConfig, done: Done) -> None:
        self._own.read(adapter, done)

    def register(self, version: int, adapter: AdapterConfig) -> None:
        self._own.register(version, adapter)
        self._ranks.send_adapter(RegisterAdapter(version, adapter))

    def prepare(self, version: int, done: Done) -> None:
        self._ranks.send_adapter(HandleAdapter("prepare", version))
        self._own.prepare(version, done)

    def release(self, version: int) -> None:
        self._own.release(version)
        self._ranks.send_adapter(HandleAdapter("release", version))

    def forget(self, version: int) -> None:
        self._own.forget(version)
        self._ranks.send_adapter(HandleAdapter("forget", version))


@dataclass(frozen=True)
class RankedStep:
    own: StartedStep
    ranks: Ranks

    def result(self) -> StepResult:
        """Wait for the result. Raises the error that ended the ranks, if that caused the error of this one."""
        try:
            result = self.own.result()
        except Exception as error:
            raise self.ranks.find_cause(error) from error
        self.ranks.step_finished(result)
        return result


class RankedWorker:
    """`weight_bytes` and `kv_bytes` are sums over all ranks; `memory` has one entry per rank. `layout` and `blocks` are
    equal on all ranks."""

    def __init__(self, own: Worker, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self.model, self.layout, self.seconds, self.blocks = own.model, own.layout, own.seconds, own.blocks
        self.weight_bytes = own.weight_bytes + ranks.weight_bytes
        self.kv_bytes = ranks.size * own.kv_bytes
        self.memory = (*own.memory, *ranks.memory)
        self.arithmetic, self.reserved, self.snapshots = own.arithmetic, own.reserved, own.snapshots
        self.adapters = None if own.adapters is None else RankedAdapters(own.adapters, ranks)

    def start(self, plan: StepPlan, masks: Masks | PendingMasks) -> RankedStep:
        self._ranks.send(plan, masks)
        return RankedStep(self._own.start(plan, masks), self._ranks)

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Run a function in the thread of rank 0, after the steps that were started."""
        return self._own.call(function)

    def close(self) -> None:
        self._own.close()
        self._ranks.close()
