import re
from pathlib import Path

from appliance.config import exits
from engine.api.errors import EXIT_PERMANENT

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def test_names_and_numbers_are_distinct_and_stay_clear_of_shells_and_signals():
    numbers = [each.number for each in exits.EXITS]
    assert len(set(numbers)) == len({each.name for each in exits.EXITS}) == len(exits.EXITS)
    assert all(0 <= number < 125 for number in numbers)
    assert EXIT_PERMANENT not in numbers


def test_a_wrong_manifest_is_2_and_a_stop_is_0():
    assert (exits.OK.number, exits.MANIFEST.number) == (0, 2)


def test_the_documentation_has_the_same_table():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*) \| (.*) \|$", OPERATIONS.read_text(), re.MULTILINE)
    assert rows == [(str(each.number), each.name, each.cause, each.cure) for each in exits.EXITS]
