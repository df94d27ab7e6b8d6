"""The table of scenarios matches the code, and each scenario has an assertion."""

import re
from pathlib import Path

from appliance.chaos.faults import SCENARIOS
from appliance.cli.chaos import chosen

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def test_the_documentation_has_the_same_scenarios():
    page = OPERATIONS.read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| .* \|$", page[page.index("## Chaos") :], re.MULTILINE)
    assert [row for row in rows if row[0] in {each.name for each in SCENARIOS}] == [
        (each.name, each.about) for each in SCENARIOS
    ]


def test_scenarios_are_selected_in_order_and_unknown_names_are_returned():
    assert [each.name for each in chosen("hang, crash")[0]] == ["hang", "crash"]
    assert chosen("crash,crush") == (chosen("crash")[0], ["crush"])
    assert chosen("all") == (list(SCENARIOS), [])
    assert chosen("") == ([], [])
