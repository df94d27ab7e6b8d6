"""`slipway key`: the printed list accepts the printed key."""

import subprocess
import sys

from appliance.security.keys import digest, parse_keys


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "appliance", "key", *words], capture_output=True, text=True, check=False
    )


def test_the_line_is_of_the_key_and_does_not_hold_it():
    told = run("name=alice", "requests_per_minute=60")
    key, line = told.stdout.splitlines()
    (parsed,) = parse_keys([line], "list")
    assert parsed.digest == digest(key) and (parsed.name, parsed.requests_per_minute) == ("alice", 60)
    assert key not in line and len(key) > 40


def test_a_word_that_means_nothing_is_refused_before_a_key_is_made():
    told = run("nme=alice")
    assert told.returncode == 2 and told.stdout == ""
    assert told.stderr.startswith("slipway key: word 2 must be one of name=")
