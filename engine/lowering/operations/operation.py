"""Base of all operations: the buffers that one reads and writes follow from its fields."""

from typing import ClassVar


class Operation:
    """An operation reads all buffers among its fields except the `written` ones. It reads the buffers that it changes
    `in_place`, also if it changes only some of their columns."""

    written: ClassVar[tuple[str, ...]] = ("y",)
    in_place: ClassVar[tuple[str, ...]] = ()
