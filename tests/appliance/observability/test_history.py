"""The load of the last half hour."""

from appliance.observability.history import MAX_SAMPLES, NAMES, History, Sample


def taken(number: int) -> Sample:
    return Sample(*(float(number) for _ in NAMES))


def test_history_keeps_the_last_samples_in_order() -> None:
    history = History()
    for number in range(MAX_SAMPLES + 7):
        history.add(taken(number))
    columns = history.columns(MAX_SAMPLES)
    assert columns.keys() == {"interval_s", *NAMES}
    assert all(columns[name] == [float(number) for number in range(7, MAX_SAMPLES + 7)] for name in NAMES)
    assert history.columns(3)["running"] == [MAX_SAMPLES + 4, MAX_SAMPLES + 5, MAX_SAMPLES + 6]


def test_history_without_samples_is_empty() -> None:
    assert all(History().columns(10)[name] == [] for name in NAMES)
