"""The benchmark of media runs, and a repeated image has an earlier first token."""

from benchmarks.media import main


def test_every_part_is_measured() -> None:
    found = main(
        [*("--rounds", "2", "--edge", "112", "--depth", "1", "--width", "32"), *("--seconds", "1", "--threads", "1")]
    )
    assert found.keys() == {"preprocessing", "encoding", "first_token", "speech"}
    for part in found.values():
        assert len(part) == 2 and all(one["least"] > 0 for one in part.values())
