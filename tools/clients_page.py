"""Write docs/clients.md from the results of tests/clients: `python tools/clients_page.py TABLE.json`."""

import argparse
import json
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "clients.md"
HEAD = """\
# Clients

Check that your client library works with Slipway. The tests run unmodified releases of these clients against the demo
service: `make clients` creates an environment for them, starts the service, runs `tests/clients` and writes this page.
A feature works if its tests passed. An empty cell is a feature that the client lacks or that is not tested.

"""


def page(rows: list[dict[str, object]]) -> str:
    """Return the page: a table of clients by features, in the order of first appearance."""
    features: list[str] = []
    for row in rows:
        shown = row["features"]
        assert isinstance(shown, dict)
        features += [feature for feature in shown if feature not in features]
    lines = [f"| client | {' | '.join(features)} |", f"|---|{'---|' * len(features)}"]
    for row in rows:
        shown = row["features"]
        assert isinstance(shown, dict)
        lines.append(f"| {row['client']} {row['version']} | {' | '.join(shown.get(each, '') for each in features)} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path, help="JSON file that tests/clients wrote")
    parser.add_argument("--out", type=Path, default=PAGE, help="page to write (default: docs/clients.md)")
    options = parser.parse_args()
    options.out.write_text(page(json.loads(options.table.read_text())))


if __name__ == "__main__":
    main()
