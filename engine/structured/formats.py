"""Regular expressions for dates and times of RFC 3339, including month lengths, leap years and leap seconds.

A leap second is the last second of a day in UTC. It is accepted only with the offset Z or +00:00, because other offsets
would shift its hour.
"""

from typing import Final

_YEAR = "[0-9]{4}"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_MONTH_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_YEAR}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_OFFSET = "([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FRACTION = r"(\.[0-9]+)?"
_TIME = f"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}|23:59:60{_FRACTION}([Zz]|[+-]00:00))"

PATTERNS: Final = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}[Tt]{_TIME}"}
