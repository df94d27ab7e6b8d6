"""The benchmark of media runs, and writes means and percentiles of each stage."""

import json
from pathlib import Path

from benchmarks.media import main


def test_every_part_is_measured(tmp_path: Path) -> None:
    found = main(
        [*("--rounds", "2", "--edge", "112", "--depth", "1", "--width", "32"), *("--seconds", "1", "--threads", "1")]
        + ["--json", str(tmp_path / "out.json")]
    )
    written = json.loads((tmp_path / "out.json").read_text())
    one = written["preprocessing"]["gateway"]
    assert len(one["values"]) == 2 and one["p50"] == min(one["values"]) and one["p99"] == max(one["values"])
    assert one["mean"] == sum(one["values"]) / 2 == one["median"]
    assert found.keys() == {"preprocessing", "encoding", "first_token", "speech"}
    for part in found.values():
        assert len(part) == 2 and all(one["least"] > 0 for one in part.values())
