"""Isolation of requests that crash engines, in a simulated service: poison requests are isolated after few crashes,
and other requests never are, whatever the cause of a crash."""

import math
import random
import statistics

import pytest

from appliance.server.routing.quarantine import InFlight, Quarantine
from tests.appliance.server.routing.quarantine_simulation import Request, Simulation, poison_after, poison_at

SIZES = [
    (1, 1),
    (2, 1),
    (2, 2),
    (3, 2),
    (3, 3),
    (4, 2),
    (4, 4),
    (8, 1),
    (8, 2),
    (8, 8),
    (32, 1),
    (32, 2),
    (32, 3),
    (32, 4),
]


def simulation(seed: int, requests: int, poison: int, arrival_s: float = 0.0) -> tuple[Simulation, set[str]]:
    """Requests that arrive within `arrival_s`, and the names of those that crash the engine."""
    rng = random.Random(seed)
    names = [f"r{number}" for number in range(requests)]
    bad = set(rng.sample(names, poison))
    made = {}
    for name in names:
        length, crashes = rng.randint(40, 150), None
        if name in bad:
            after, at = rng.choice([0, 1, 2, 5, 12, 12, 30, 60]), rng.randrange(length - 1)
            crashes = poison_after(after) if rng.random() < 0.6 else poison_at(at)
        made[name] = Request(length, crashes, rng.choice([0, 0, 0, 3, 20]), rng.uniform(0, arrival_s))
    return Simulation(made, rng), bad


def limit(requests: int, poison: int) -> float:
    return 5 + 2 * poison * math.log2(requests)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("arrival_s", [0.0, 3.0])
@pytest.mark.parametrize(("requests", "poison"), SIZES)
@pytest.mark.parametrize("seed", range(12))
def test_poison_requests_are_isolated_within_the_limit_of_crashes(seed, requests, poison, arrival_s):
    service, bad = simulation(seed, requests, poison, arrival_s)
    service.run()
    assert service.isolated <= bad, f"seed {seed}"
    assert all(service.requests[name].end for name in bad)
    assert all(request.end == "finished" for name, request in service.requests.items() if name not in bad)
    assert service.crashes <= limit(requests, poison)
    if not arrival_s:
        assert service.most_charged <= 2
    pauses = [request.paused_s for name, request in service.requests.items() if name not in bad]
    if len(pauses) > 2:
        assert statistics.median(pauses) <= service.crashes * (service.start_s + 6.0)


@pytest.mark.slow
@pytest.mark.parametrize("poison", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_poison_among_256_requests_costs_few_crashes(seed, poison):
    service, bad = simulation(seed, 256, poison)
    service.run()
    assert service.isolated <= bad
    assert all(request.end == "finished" for name, request in service.requests.items() if name not in bad)
    assert service.crashes <= min(limit(256, poison), 32)
    assert service.most_charged <= 2


@pytest.mark.parametrize("tokens", [0, 1, 3, 12, 40])
def test_a_request_that_gains_tokens_before_each_crash_is_isolated(tokens):
    """Restart limit of 2: at most two crashes count at any time, and none once the request is isolated"""
    requests = {f"r{number}": Request(400) for number in range(31)} | {"bad": Request(400, poison_after(tokens))}
    service = Simulation(requests, random.Random(tokens)).run()
    assert service.isolated == {"bad"}
    assert service.crashes <= limit(32, 1)
    assert (service.most_charged, service.charged) == (2, 0)


def test_two_poison_requests_with_different_crash_points_are_both_isolated():
    requests = {f"r{number}": Request(300) for number in range(31)}
    requests |= {"first": Request(300, poison_after(12)), "second": Request(300, poison_after(40))}
    service = Simulation(requests, random.Random(3)).run()
    assert service.isolated == {"first", "second"}
    assert service.crashes <= limit(33, 2)
    assert service.most_charged <= 2


def test_a_poison_request_among_long_running_ones_is_isolated_after_few_crashes():
    """The long-running requests are less likely to be the cause, so they are not tested first"""
    requests = {f"r{number}": Request(500) for number in range(31)}
    requests["bad"] = Request(500, poison_after(0), arrival_s=2.0)
    service = Simulation(requests, random.Random(1)).run()
    assert service.isolated == {"bad"}
    assert service.crashes <= 6


@pytest.mark.parametrize("seed", range(10))
def test_a_request_that_crashes_the_engine_at_random_tokens_does_not_end_others(seed):
    rng = random.Random(seed)
    requests = {f"r{number}": Request(100) for number in range(15)}
    requests["bad"] = Request(100, lambda position, gain: rng.random() < 0.08)
    service = Simulation(requests, rng).run()
    assert service.isolated <= {"bad"}


@pytest.mark.parametrize("kill_starting", [True, False])
@pytest.mark.parametrize("every_s", [2.0, 3.0, 5.0])
@pytest.mark.parametrize("seed", range(8))
def test_engines_killed_at_random_isolate_no_request(seed, every_s, kill_starting):
    """Short and long prefills; kills also hit engines that start or have no request"""
    rng = random.Random(seed)
    count = rng.choice([1, 2, 8, 32])
    requests = {
        f"r{number}": Request(rng.randint(50, 400), None, rng.choice([0, 0, 3, 20, 100]), rng.uniform(0, 5))
        for number in range(count)
    }
    start_s = rng.choice([0.2, 2.0])
    service = Simulation(requests, rng, start_s=start_s, kill_every_s=every_s, kill_starting=kill_starting)
    service.run()
    assert {request.end for request in requests.values()} == {"finished"}, f"seed {seed}"


def test_several_kills_in_a_row_isolate_no_request():
    requests = {f"r{number}": Request(200) for number in range(8)}
    service = Simulation(requests, random.Random(5), start_s=0.1, kill_every_s=0.5, kills_left=12)
    service.run()
    assert service.isolated == set() and service.crashes == 12


def test_crashes_of_tests_that_every_request_passes_count_again():
    """Two crashes by kills make a candidate, a third kill hits its test, then it passes: all three count"""
    quarantine = Quarantine()
    for _ in range(2):
        assert not quarantine.crashed("engine-0", [InFlight("a", 10, 10, 0.5)]).exempt
    group = quarantine.next_group(["a"], idle=True)
    assert group is not None and group.alone and group.control_s >= 1.0
    assert quarantine.crashed("engine-1", [InFlight("a", 12, 2, 0.1)]).exempt
    assert quarantine.settle() is None
    assert quarantine.next_group(["a"], idle=True) is not None
    assert quarantine.gained("a", 100)
    settlement = quarantine.settle()
    assert settlement is not None and settlement.restored == ("engine-1",)
    assert quarantine.settle() is None and not quarantine.on


def poisoned(quarantine: Quarantine, crashes: int) -> list[str]:
    """Crash the engine at the first token of one request, also if it is tested alone. Return the isolated requests."""
    isolated = []
    for _ in range(crashes):
        quarantine.next_group(["a"], idle=True)
        isolated.append(quarantine.crashed("engine-0", [InFlight("a", 0, 0, 0.05)]).isolated)
    return isolated


def test_a_request_alone_is_isolated_at_the_fourth_crash():
    assert poisoned(Quarantine(), 4) == ["", "", "", "a"]


def test_a_crash_without_requests_discards_the_proof():
    quarantine = Quarantine()
    assert poisoned(quarantine, 3) == [""] * 3
    assert not quarantine.crashed("engine-0", []).exempt
    assert poisoned(quarantine, 3) == ["", "", "a"], "three more crashes alone instead of one"


def test_a_crash_in_company_proves_nothing():
    quarantine = Quarantine()
    for _ in range(12):
        quarantine.next_group(["a"], idle=False)
        in_flight = [InFlight("a", 3, 0, 0.05), InFlight("new", 0, 0, 0.05)]
        assert quarantine.crashed("engine-0", in_flight).isolated == ""
        quarantine.ended("new")


def test_a_control_run_that_fails_leaves_the_request_a_candidate():
    quarantine = Quarantine()
    poisoned(quarantine, 2)
    for _ in range(9):
        group = quarantine.next_group(["a"], idle=True)
        assert group is not None and group.keys == ("a",)
        quarantine.crashed("engine-0", [])
        quarantine.withdraw()
    assert quarantine.is_candidate("a") and not quarantine.is_tested("a")


def test_clients_that_leave_end_the_test_and_their_crashes_do_not_count():
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.crashed("engine-0", [InFlight(key, 0, 0, 0.05) for key in "abc"])
    group = quarantine.next_group("abc", idle=True)
    assert group is not None and quarantine.next_group("abc", idle=True) is None
    assert quarantine.crashed("engine-0", [InFlight(key, 0, 0, 0.05) for key in group.keys]).exempt
    for key in "abc":
        quarantine.ended(key)
    assert not quarantine.on
    settlement = quarantine.settle()
    assert settlement is not None
    assert (settlement.restored, settlement.attributed) == ((), ("engine-0", "engine-0"))


def test_a_request_that_the_engine_cannot_take_is_tested_later():
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.crashed("engine-0", [InFlight(key, 0, 0, 0.05) for key in "ab"])
    group = quarantine.next_group(["b"], idle=True)
    assert group is not None and group.keys == ("b",)
    assert quarantine.is_candidate("a") and not quarantine.is_tested("a")
    assert quarantine.gained("b", 50)
    later = quarantine.next_group(["a"], idle=False)
    assert later is not None and later.keys == ("a",) and not later.alone
