"""An engine takes the CPUs that it was given, or says that it cannot."""

import os

import pytest

from engine.api.errors import ConfigError
from engine.arguments import engine_config
from engine.binding import bind

ALLOWED = os.sched_getaffinity(0)


@pytest.fixture
def configured():
    """A configuration with these fields; afterwards this process runs where it did."""
    yield lambda **fields: engine_config(model="/m", kv_bytes=1, max_context=7, **fields)
    os.sched_setaffinity(0, ALLOWED)


def test_the_process_runs_on_its_cpus_even_if_its_parent_may_not(configured):
    first, last = min(ALLOWED), max(ALLOWED)
    os.sched_setaffinity(0, {last})
    bind(configured(process_cpus=(first,)))
    assert os.sched_getaffinity(0) == {first}
    bind(configured())
    assert os.sched_getaffinity(0) == {first}


@pytest.mark.parametrize("cpus", [(9000,), (min(ALLOWED), 9000)])
def test_cpus_that_are_not_there_are_named(configured, cpus):
    with pytest.raises(ConfigError, match="9000"):
        bind(configured(process_cpus=cpus))


def test_number_of_cpus_must_match_the_threads(configured):
    with pytest.raises(ConfigError, match="must name one CPU for each of 2 threads"):
        configured(threads=2, cpus=(0,))
