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
import ssl
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
    "e2e/test_survive.py",
    "e2e/test_adapters.py",
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
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The demo model, ready, for all files that change nothing in it: an Appliance of tests/e2e/conftest.py that all
    workers share. Its KV cache is float32, as in transformers."""
    from tests.e2e.conftest import DEMO, launcher
    from tests.e2e.shared import describe, described_appliance, use_shared

    @contextmanager
    def start() -> Iterator[dict[str, Any]]:
        with launcher(tmp_path_factory) as launch:
            appliance = launch(DEMO, "--quantization.kv_cache", "float32")
            appliance.wait_ready()
            yield describe(appliance)

    appliance = described_appliance(use_shared(request.config, "demo", start, tmp_path_factory))
    yield appliance
    appliance.client.close()


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """Let all clients of httpx share the context with the certificates of public authorities. Reading them takes 20 ms
    of CPU time for each client, and services of tests are reached by http, or have certificates of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("httpx", "httpx2"):  # openai and anthropic use the second one
            module = import_module(f"{name}._transports.default")
            patch.setattr(module, "create_ssl_context", with_one_public(module.create_ssl_context))
        yield


def with_one_public(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """Return the function with one context for all calls without certificates of their own."""
    public = cache(create)

    def made(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        usual = verify is True and cert is None and not {"SSL_CERT_FILE", "SSL_CERT_DIR"} & os.environ.keys()
        return public() if usual else create(verify, cert, trust_env)

    return made


@pytest.fixture(scope="session")
def shared_renderers() -> Iterator[None]:
    """Check the chat templates of all plans in the same processes, as a gateway does. A plan starts its own otherwise:
    0.15 s of CPU time instead of 0.02 s."""
    from appliance.chat_templates import template
    from appliance.chat_templates.renderers import Renderers

    with pytest.MonkeyPatch.context() as patch:
        renderers, plain = Renderers(), template.ChatTemplate

        def made(sources: Any, special_tokens: Any, own: Renderers = renderers) -> template.ChatTemplate:
            return plain(sources, special_tokens, own)

        patch.setattr(template, "ChatTemplate", made)
        yield
        renderers.close()


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


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "tests.e2e.shared" in sys.modules:
        from tests.e2e.shared import leave_shared

        leave_shared(session.config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Limit the time of the teardown. pytest cancels its timeout once a test has failed, so a teardown could
    hang forever."""
    limit = float(item.config.getini("faulthandler_timeout"))
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    yield
