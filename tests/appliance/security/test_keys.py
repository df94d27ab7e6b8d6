"""Lists of API keys: in the clear and hashed, with names, limits and shares, and every way to get a line wrong."""

import hashlib

import pytest

from appliance.security.keys import ApiKey, parse_keys
from engine.api.errors import ConfigError

HASH = hashlib.sha256(b"sk-secret").hexdigest()


def test_a_key_and_its_hash_are_the_same_key():
    (clear,) = parse_keys(["sk-secret"], "k")
    (hashed,) = parse_keys([f"sha256:{HASH.upper()}"], "k")
    assert clear == hashed == ApiKey(bytes.fromhex(HASH))


def test_fields_after_a_key_set_name_limits_and_share():
    lines = [
        "# clients",
        "",
        f"  sha256:{HASH}  name=alice requests_per_minute=60  share=2.5 priority=yes adapters=yes # until spring",
        "sk-b\t# b",
    ]
    alice, other = parse_keys(lines, "k")
    assert alice == ApiKey(bytes.fromhex(HASH), "alice", 60, None, 2.5, priority=True, adapters=True)
    assert (other.name, other.shown, other.share, other.priority, other.adapters) == ("", "unnamed", 1.0, False, False)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["sk-secret admin"], "line 1: word 2 must be one of name=…, requests_per_minute=…"),
        (["sk-secret nme=x"], "line 1: word 2 must be one of"),
        (["ok", "sk-secret name=a b"], "line 2: word 3 must be one of"),
        (["sk-secret name="], "name=: must be 1"),
        (["sk-secret name=a name=b"], "name occurs twice"),
        (["sk-secret tokens_per_minute=0"], "tokens_per_minute=0: must be a whole number of at least 1"),
        (["sk-secret tokens_per_minute=1e3"], "whole number"),
        (["sk-secret share=0"], "share=0: must be a number from 0.01 to 100"),
        (["sk-secret share=nan"], "from 0.01 to 100"),
        (["sk-secret priority=1"], "priority=1: must be yes or no"),
        (["sha256:1234"], "64 hexadecimal digits"),
        (["sk-secret", "other", f"sha256:{HASH}"], "line 3: this key is already on an earlier line"),
        (["sk-secret name=a", "other name=a"], "line 2: name=a is already on an earlier line"),
    ],
)
def test_wrong_line_is_reported_without_the_key(lines, message):
    with pytest.raises(ConfigError) as refused:
        parse_keys(lines, "keys")
    assert message in str(refused.value) and str(refused.value).startswith("keys, line ")
    assert "sk-secret" not in str(refused.value) and HASH not in str(refused.value)
