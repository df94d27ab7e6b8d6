"""Quota of a key per minute: token buckets compared with an oracle that counts admissions, and the client's view."""

import random

import pytest

from appliance.security.allowance import Allowances, LimitReached
from appliance.security.keys import ApiKey, digest


def key(name: str, **limits: int) -> ApiKey:
    return ApiKey(digest(name), name, **limits)


def allowances(*keys: ApiKey, requests: int | None = None, tokens: int | None = None) -> Allowances:
    made = Allowances()
    made.allow(keys, requests, tokens, 0.0)
    return made


def test_no_window_admits_more_than_its_rate_plus_one_minute():
    alice = key("alice", requests_per_minute=30)
    made, chance = allowances(alice), random.Random(7)
    let_in, at = [], 0.0
    for _ in range(4000):
        at += chance.expovariate(2.0)  # four times the allowed rate
        if made.enter(alice.owner, at) is None:
            let_in.append(at)
    for _ in range(2000):
        begin, end = sorted(chance.uniform(0, at) for _ in range(2))
        count = sum(begin <= each <= end for each in let_in)
        assert count <= 30 + (end - begin) / 2 + 1
    assert len(let_in) == pytest.approx(30 + at / 2, abs=2), "and no less over time"


def test_refusal_has_the_exact_time_until_the_next_admission():
    alice = key("alice", requests_per_minute=6)
    made = allowances(alice)
    assert [made.enter(alice.owner, 0.0) for _ in range(6)] == [None] * 6
    refused = made.enter(alice.owner, 1.0)
    assert refused is not None and (refused.unit, refused.per_minute) == ("requests", 6)
    assert refused.seconds == pytest.approx(9.0)
    assert made.enter(alice.owner, 1.0 + refused.seconds - 0.01) is not None
    assert made.enter(alice.owner, 1.0 + refused.seconds + 0.01) is None


def test_request_that_empties_the_bucket_is_served_and_its_deficit_refills():
    alice = key("alice", tokens_per_minute=600)
    made = allowances(alice)
    made.spend(alice.owner, 599, 0.0)
    assert made.enter(alice.owner, 0.0) is None, "one is left"
    made.spend(alice.owner, 301, 0.0)
    refused = made.enter(alice.owner, 0.0)
    assert refused is not None and refused.unit == "tokens" and refused.seconds == pytest.approx(30.0)
    assert made.enter(alice.owner, 30.1) is None
    assert made.headers(alice.owner, 0.0)["x-ratelimit-remaining-tokens"] == "0"


def test_a_refused_request_consumes_no_quota_and_reports_the_longer_wait():
    alice = key("alice", requests_per_minute=60, tokens_per_minute=60)
    made = allowances(alice)
    made.spend(alice.owner, 70, 0.0)
    refusals = [made.enter(alice.owner, 0.0) for _ in range(100)]
    assert all(isinstance(each, LimitReached) and each.unit == "tokens" for each in refusals)
    assert made.headers(alice.owner, 0.0)["x-ratelimit-remaining-requests"] == "60"


def test_limits_of_a_key_override_the_general_ones():
    alice, bob, carol = key("alice", requests_per_minute=1), key("bob"), key("carol", requests_per_minute=5)
    made = allowances(alice, bob, carol, requests=2)
    let_in = {each.name: sum(made.enter(each.owner, 0.0) is None for _ in range(10)) for each in (alice, bob, carol)}
    assert let_in == {"alice": 1, "bob": 2, "carol": 5}


def test_key_without_limits_is_never_refused_and_gets_no_headers():
    alice = key("alice")
    made = allowances(alice)
    made.spend(alice.owner, 10**9, 0.0)
    assert all(made.enter(alice.owner, 0.0) is None for _ in range(1000))
    assert made.headers(alice.owner, 0.0) == {}


def test_changed_limits_keep_the_used_amounts():
    alice = key("alice")
    made = allowances(alice, requests=10)
    for _ in range(8):
        made.enter(alice.owner, 0.0)
    made.allow([alice], 20, None, 0.0)
    assert made.headers(alice.owner, 0.0)["x-ratelimit-remaining-requests"] == "12"
    made.allow([alice], 5, None, 0.0)
    refused = made.enter(alice.owner, 0.0)
    assert refused is not None and refused.seconds == pytest.approx(48.0), "three are owed and one is wanted, of 5"
    made.allow([alice], None, None, 0.0)
    assert made.enter(alice.owner, 0.0) is None


@pytest.fixture
def limited(start_gateway, engine):
    return start_gateway(
        engine,
        keys=[ApiKey(digest("sk-a"), "alice", requests_per_minute=2), ApiKey(digest("sk-b"), tokens_per_minute=12)],
        **{"limits.per_key.requests_per_minute": 1000},
    )


def ask(gateway, key, **body):
    headers = {"authorization": f"Bearer {key}"}
    return gateway.client.post("/test/generate", json={"prompt": [1, 2, 3], "max_tokens": 4, **body}, headers=headers)


def test_client_over_its_limit_gets_429_and_others_do_not(limited):
    first, second = ask(limited, "sk-a"), ask(limited, "sk-a")
    assert (first.status_code, second.status_code) == (200, 200)
    left = [reply.headers["x-ratelimit-remaining-requests"] for reply in (first, second)]
    assert left == ["1", "0"] and first.headers["x-ratelimit-limit-requests"] == "2"
    refused = ask(limited, "sk-a")
    error = refused.json()["error"]
    assert refused.status_code == 429 and (error["type"], error["code"]) == ("RateLimitError", 429)
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert "2 requests per minute" in error["message"]
    assert ask(limited, "sk-b").status_code == 200
    assert limited.metric("slipway_key_refusals_total", key="alice", unit="requests") == 1


def test_prompt_and_reply_tokens_are_counted_and_reported_by_key(limited):
    statuses = [ask(limited, "sk-b").status_code for _ in range(4)]
    assert statuses == [200, 200, 429, 429], "3 + 4 twice are over 12"
    assert limited.metric("slipway_key_tokens_total", key="unnamed") == 14


def test_requests_without_generation_are_free(limited):
    headers = {"x-api-key": "sk-a"}
    assert all(limited.client.get("/v1/models", headers=headers).status_code == 200 for _ in range(5))
    assert ask(limited, "sk-a").headers["x-ratelimit-remaining-requests"] == "1"
