"""Which W3C trace headers are taken, and which are ignored (RT-06). Cases from the standard's text."""

import pytest

from appliance.observability.trace import MAX_MEMBERS, MAX_STATE, Trace, read_trace

ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{ID}-{SPAN}-01"


@pytest.mark.parametrize(
    "parent", [GOOD, f"00-{ID}-{SPAN}-00", f" {GOOD}\t", f"01-{ID}-{SPAN}-01", f"cc-{ID}-{SPAN}-01-new"]
)
def test_valid_parent_of_any_version_is_accepted(parent):
    assert read_trace([parent], []) == Trace(ID, SPAN, sampled=not parent.endswith("-00"))


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True), ("fe", False)]
)
def test_sampled_flag_is_the_lowest_bit(flags, sampled):
    trace = read_trace([f"00-{ID}-{SPAN}-{flags}"], [])
    assert trace is not None and trace.sampled is sampled


@pytest.mark.parametrize(
    "parents",
    [
        [],
        [""],
        [GOOD, GOOD],
        [GOOD.upper()],
        [f"ff-{ID}-{SPAN}-01"],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{ID}-{'0' * 16}-01"],
        [f"00-{ID[1:]}-{SPAN}-01"],
        [f"00-{ID}-{SPAN}-1"],
        [f"00-{ID}-{SPAN}"],
        [f"{GOOD}-more"],
        [f"01-{ID}-{SPAN}-01more"],
        [f"00-{ID[:-1]}g-{SPAN}-01"],
        [f"{GOOD}\n"],
    ],
)
def test_invalid_parent_is_ignored(parents):
    assert read_trace(parents, ["a=1"]) is None


@pytest.mark.parametrize(
    ("headers", "state"),
    [
        (["a=1"], "a=1"),
        (["a=1,b=2", "c=3"], "a=1,b=2,c=3"),
        ([" a=1 \t, ,\tb=x y:z"], "a=1,b=x y:z"),
        (["tenant@vendor=1", "0a-_*/=~"], None),  # a key begins with a letter, a tenant may begin with a digit
        (["0tenant@vendor=1,a-_*/=~"], "0tenant@vendor=1,a-_*/=~"),
        (["a" * 256 + "=" + "v" * 200], "a" * 256 + "=" + "v" * 200),
        ([",".join(f"k{number}=v" for number in range(MAX_MEMBERS))], ",".join(f"k{n}=v" for n in range(MAX_MEMBERS))),
        ([",".join(f"k{number}=v" for number in range(MAX_MEMBERS + 1))], None),
        (["a=" + "v" * 250 + ",b=" + "v" * 250 + ",c=" + "v" * (MAX_STATE - 507)], None),
        ([], None),
        ([" , "], None),
        (["a=1,a=2"], None),
        (["a"], None),
        (["a="], None),
        (["=1"], None),
        (["A=1"], None),
        (["a=b=c"], None),
        (["a=\u00e9"], None),
        (["a=1\nb=2"], None),
        (["a" * 257 + "=1"], None),
        (["a=" + "v" * 257], None),
    ],
)
def test_state_is_accepted_completely_or_ignored(headers, state):
    assert read_trace([GOOD], headers) == Trace(ID, SPAN, state)
