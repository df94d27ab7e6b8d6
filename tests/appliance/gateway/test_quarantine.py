"""Who is convicted: culprits always, innocents never, in a simulated world where steps are counted and engines die of
what they are given, or of a hand that kills them."""

import math
import random
from dataclasses import dataclass, field

import pytest

from appliance.gateway.quarantine import Quarantine, content_hash
from engine.api.messages import Sampling, Submit


@dataclass
class World:
    """One engine and its requests: `length` tokens each, and for culprits the token at which they end the engine. It
    releases requests as the router does."""

    lengths: dict[str, int]
    culprits: dict[str, int]
    rng: random.Random
    kill_chance: float = 0.0
    quarantine: Quarantine = field(default_factory=Quarantine)

    def __post_init__(self) -> None:
        self.tokens = dict.fromkeys(self.lengths, 0)
        self.hall = list(self.lengths)
        self.open: dict[str, int] = {}  # key → tokens when it was placed
        self.convicted: list[str] = []
        self.deaths = self.explained = 0

    def release(self) -> None:
        reserved = bool(self.quarantine.alone)
        if self.quarantine.on:
            keys, alone = self.quarantine.next_cohort(idle=not self.open)
            assert not (alone and len(keys) != 1)
            reserved = reserved or alone
        for key in list(self.hall):
            suspect = self.quarantine.is_suspect(key)
            if self.quarantine.runs(key) or (not suspect and not reserved):
                self.hall.remove(key)
                self.open[key] = self.tokens[key]

    def step(self) -> None:
        if any(self.culprits.get(key) == self.tokens[key] for key in self.open) or (
            self.rng.random() < self.kill_chance and self.open
        ):
            return self.die()
        for key in list(self.open):
            self.tokens[key] += 1
            if self.tokens[key] == self.lengths[key]:
                del self.open[key]
                self.quarantine.ended(key)
            else:
                self.quarantine.gained(key, self.tokens[key])

    def die(self) -> None:
        self.deaths += 1
        lost = self.rng.random() < 0.5  # the last step's tokens may be lost with the engine
        for key, before in self.open.items():
            if lost and self.tokens[key] > before:
                self.tokens[key] -= 1
        flying = [(key, self.tokens[key], self.tokens[key] > before) for key, before in self.open.items()]
        verdict = self.quarantine.died(flying)
        self.explained += verdict.explained
        self.hall += [key for key in self.open if key not in verdict.convicted]
        self.convicted += verdict.convicted
        self.open.clear()

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            self.release()
            if not self.open and not self.hall:
                return
            self.step()
        raise AssertionError(f"not over: {self.hall} wait, {self.open} run, {vars(self.quarantine)}")


@pytest.mark.parametrize("seed", range(200))
def test_culprits_are_convicted_and_everyone_else_finishes(seed):
    rng = random.Random(seed)
    names = [f"r{number}" for number in range(rng.choice([1, 2, 3, 8, 32]))]
    lengths = {name: rng.randint(4, 60) for name in names}
    culprits = {
        name: rng.randrange(lengths[name]) for name in rng.sample(names, min(len(names), rng.choice([1, 1, 2])))
    }
    world = World(lengths, culprits, rng)
    world.run()
    assert sorted(world.convicted) == sorted(culprits)
    assert all(world.tokens[name] == lengths[name] for name in names if name not in culprits)
    if len(culprits) == 1:  # of two, one may be cleared by the other's deaths and be found later
        assert world.deaths <= 5 + math.ceil(math.log2(len(names) + 1))
    assert world.explained >= 2 * len(culprits)


def test_a_culprit_that_has_just_come_costs_five_engines_at_most():
    """Those that run well for long are tried first, so the halving costs no engine"""
    lengths = {f"r{number}": 500 for number in range(31)} | {"bad": 500}
    world = World(lengths, {"bad": 0}, random.Random(1))
    world.hall.remove("bad")
    for _ in range(50):
        world.release()
        world.step()
    world.hall.append("bad")
    world.run()
    assert world.convicted == ["bad"]
    assert world.deaths <= 5


@pytest.mark.parametrize("seed", range(100))
def test_hands_that_kill_engines_convict_nobody(seed):
    """Deaths at random moments, one in fifty steps: whoever gains tokens between them is cleared"""
    rng = random.Random(seed)
    lengths = {f"r{number}": rng.randint(20, 80) for number in range(rng.choice([1, 4, 32]))}
    world = World(lengths, {}, rng, kill_chance=0.02)
    world.run()
    assert world.convicted == []
    assert world.tokens == lengths


def test_two_deaths_in_a_row_convict_no_one_even_alone():
    quarantine = Quarantine()
    for _ in range(2):
        assert quarantine.died([("a", 0, False)]).convicted == ()
    assert quarantine.next_cohort(idle=True) == (("a",), True)
    assert quarantine.died([("a", 0, False)]).convicted == ()
    assert quarantine.next_cohort(idle=True) == (("a",), True)
    assert quarantine.died([("a", 0, False)]).convicted == ("a",)
    assert not quarantine.on


def test_an_engine_that_dies_under_its_probe_proves_nothing():
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.died([("a", 3, True)])
    for _ in range(9):
        assert quarantine.next_cohort(idle=True) == (("a",), True)
        assert not quarantine.died([]).explained
        quarantine.withdraw()
    assert quarantine.on and not quarantine.runs("a")


def test_one_that_does_not_run_alone_proves_nothing():
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.died([("a", 3, True)])
    for _ in range(9):
        assert quarantine.next_cohort(idle=False) == (("a",), False)
        assert quarantine.died([("a", 3, False), ("new", 0, False)]).convicted == ()


def test_a_client_that_leaves_ends_the_trial():
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.died([("a", 0, False), ("b", 0, False), ("c", 0, False)])
    keys, _ = quarantine.next_cohort(idle=True)
    assert quarantine.next_cohort(idle=True) == ((), False)
    assert [quarantine.ended(key) for key in keys] == [False] * (len(keys) - 1) + [True]
    for key in {"a", "b", "c"} - set(keys):
        quarantine.ended(key)
    assert not quarantine.on


def test_content_is_the_same_with_another_id_and_seed_and_different_otherwise():
    submit = Submit("x", (1, 2, 3), Sampling(seed=5), 9)
    assert content_hash(submit) == content_hash(Submit("y", (1, 2, 3), Sampling(seed=6), 9, priority=3))
    others = [
        Submit("x", (1, 2), Sampling(seed=5), 9),
        Submit("x", (1, 2, 3), Sampling(seed=5, top_k=3), 9),
        Submit("x", (1, 2, 3), Sampling(seed=5), 8),
    ]
    assert content_hash(submit) not in {content_hash(other) for other in others}
    quarantine = Quarantine()
    quarantine.convict(submit, 3)
    assert quarantine.refuses(submit) and not any(map(quarantine.refuses, others))
