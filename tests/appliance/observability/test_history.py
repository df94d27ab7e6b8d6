"""The load of the last half hour."""

from appliance.observability.history import KEPT, NAMES, History, Sample


def taken(number: int) -> Sample:
    return Sample(*(float(number) for _ in NAMES))


def test_history_keeps_the_last_samples_in_order() -> None:
    history = History()
    for number in range(KEPT + 7):
        history.add(taken(number))
    columns = history.columns(KEPT)
    assert columns.keys() == {"interval_s", *NAMES}
    assert all(columns[name] == [float(number) for number in range(7, KEPT + 7)] for name in NAMES)
    assert history.columns(3)["running"] == [KEPT + 4, KEPT + 5, KEPT + 6]


def test_history_without_samples_is_empty() -> None:
    assert all(History().columns(10)[name] == [] for name in NAMES)
