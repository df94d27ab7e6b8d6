"""Buffers of a step, and columns of them."""

from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class Value:
    """A buffer: [tokens · rows, width]."""

    name: str
    width: int  # on one rank
    rows: int = 1  # per token: the number of selected experts for pairs of a token and an expert

    @property
    def elements(self) -> int:
        """Elements per token."""
        return self.rows * self.width


@declared(frozen=True, kw_only=True)
class Columns:
    """Columns [first, first + width) of a buffer."""

    value: Value
    first: int
    width: int


def whole(value: Value) -> Columns:
    return Columns(value=value, first=0, width=value.width)


def split(value: Value, *widths: int) -> tuple[Columns, ...]:
    """Return consecutive columns of these widths, which are all of the buffer."""
    assert sum(widths) == value.width, f"{widths} are not the {value.width} columns of {value.name}"
    return tuple(Columns(value=value, first=sum(widths[:number]), width=width) for number, width in enumerate(widths))
