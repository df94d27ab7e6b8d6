"""`pytest --repeat-failed N`: run at most N failed tests again, one after another and alone.

A test of processes, signals or sockets can fail because the machine was busy with the other tests. If it passes alone,
its name is printed as a warning, because the cause still has to be found. A test that fails twice fails the run, as do
more than N failures, a worker process that crashed, and an interruption.
"""

import subprocess
import sys
from collections.abc import Generator

import pytest

CRASHED = pytest.StashKey[bool]()
"""Set if a worker process crashed; its remaining tests have not run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--repeat-failed",
        type=int,
        default=0,
        metavar="N",
        help="run at most N failed tests again, with nothing beside",
    )


def failed_tests(config: pytest.Config) -> list[str]:
    """Return the tests that failed in any phase, each once, in the order in which they failed."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    reports = (*reporter.stats.get("failed", ()), *reporter.stats.get("error", ()))
    return list(dict.fromkeys(report.nodeid for report in reports))


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_testnodedown(node: object, error: object) -> None:
    if error:
        node.config.stash[CRASHED] = True  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after the summary
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    yield
    config = session.config
    limit = 0 if hasattr(config, "workerinput") else config.getoption("repeat_failed")
    if not limit or session.exitstatus != pytest.ExitCode.TESTS_FAILED or config.stash.get(CRASHED, False):
        return
    failed = failed_tests(config)
    if not 0 < len(failed) <= limit:
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *failed]
    repeated = subprocess.run(command, cwd=config.rootpath, check=False)
    reporter = config.pluginmanager.getplugin("terminalreporter")
    reporter.ensure_newline()
    if repeated.returncode == 0:
        session.exitstatus = pytest.ExitCode.OK
        reporter.write_line(f"warning: failed beside other tests, passed alone: {', '.join(failed)}", yellow=True)
    else:
        reporter.write_line("failed twice, the second time alone: see above", red=True)
