"""Settings of the test suite.

Without a GPU, kernels run in Triton's interpreter; its environment variable must be set before they are imported. Its
matrix products add in a fixed order (tests/interpreter.py), so results do not depend on the machine's BLAS.

Hypothesis generates the same examples in every run (tests/same_examples.py); `pytest --hypothesis-profile=default`
looks for new ones. The slowest files start first, because worker processes that share the tests by file would wait for
a slow file that starts last. Files that use the demo service come last, so that it does not run beside all other files.
"""

import atexit
import faulthandler
import gc
import os
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

from tests import repeat, tiers
from tests.cells import FormatRecorder, Recorder
from tests.cells import format_cells as format_cells  # a fixture
from tests.cells import shows as shows  # a fixture
from tests.emulation import use_emulated
from tests.fast_interpreter import save_time
from tests.interpreter import fix_dot_order
from tests.same_examples import use_same_examples
from tests.tiers import mark_tiers

# Two worker processes with two OpenMP threads each compete for two cores. Threads spin while they wait for threads
# without a core: a step of a tiny model took 10 times as much CPU time.
torch.set_num_threads(1)

use_same_examples()

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        fix_dot_order()
        save_time()

LONGEST = (
    "kernels/test_aot.py",
    "e2e/test_chaos.py",
    "e2e/test_reload.py",
    "engine/layers/test_families.py",
    "engine/layers/test_architectures.py",
    "engine/test_ranks.py",
    "docs/test_commands.py",
    "engine/layers/test_more_formats.py",
    "engine/test_speculation.py",
    "appliance/constraints/test_cells.py",
    "e2e/test_speech.py",
    "e2e/test_drift.py",
    "e2e/test_sources.py",
    "engine/layers/test_fused.py",
    "e2e/test_budgets.py",
    "e2e/test_sourced.py",
    "kernels/test_ops.py",
    "engine/layers/test_fp8_checkpoints.py",
    "engine/worker/test_fused_sources.py",
)


# Processes that tests start read compiled modules. Without them a service compiles 100,000 lines at each start, which
# takes longer than the start. `make` unsets the variable too.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Programs that choose their own number of threads, such as services, set it themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The demo model, ready, for all files that change nothing in it: an Appliance of tests/e2e/conftest.py."""
    from tests.e2e.conftest import launcher

    with launcher(tmp_path_factory) as start:
        appliance = start()
        appliance.wait_ready()
        yield appliance


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--emulate", action="store_true", help="run CPU kernels for AVX-512 and AMX, emulated")
    parser.addoption("--record-cells", type=Path, help="run the tests of docs/tested-models.md, and record them here")
    text = "run the tests of docs/quantization-formats.md, and record them here"
    parser.addoption("--record-formats", type=Path, help=text)
    pluginmanager.register(repeat)


def pytest_configure(config: pytest.Config) -> None:
    tiers.FEW = "not nightly" in config.option.markexpr
    gc.disable()  # until the tests are collected, because each garbage collection would visit all of them
    if config.getoption("emulate"):
        patch = pytest.MonkeyPatch()
        config.add_cleanup(patch.undo)
        use_emulated(patch)
    if (file := config.getoption("record_cells")) is not None:
        config.pluginmanager.register(Recorder(file))
    if (file := config.getoption("record_formats")) is not None:
        config.pluginmanager.register(FormatRecorder(file))


@pytest.hookimpl(optionalhook=True)  # the tests of the page run without pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Start one worker more than there are CPUs: tests that start services wait as long as they compute. Unit tests
    start none, and each worker imports all test files."""
    starts_services = "not slow" not in config.option.markexpr
    return len(os.sched_getaffinity(0)) + starts_services


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tiers(items)
    places = {os.path.join(os.path.dirname(__file__), name): at for at, name in enumerate(LONGEST)}
    shared = {item.path for item in items if "demo" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (item.path in shared, places.get(str(item.path), len(places))))


def pytest_collection_finish() -> None:
    """Exempt modules and tests from garbage collection. Each full collection would take more than a second, and pytest
    makes several at the end. Without `unfreeze`, extension modules report their objects as leaks when the interpreter
    exits."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Limit the time of the teardown. pytest cancels its timeout once a test has failed, so a teardown could
    hang forever."""
    limit = float(item.config.getini("faulthandler_timeout"))
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    yield
