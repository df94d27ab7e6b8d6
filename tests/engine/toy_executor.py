"""An executor of another package: attention that keeps count, and computes what torch computes, or zeros."""

from engine.layers.reference.executor import FUNCTIONS
from engine.layers.reference.run import Run
from engine.lowering.operations import Attend, AttendLatent

CALLS: list[str] = []
ZEROS: list[bool] = []
"""Not empty: attention returns zeros."""


def attend(op: Attend | AttendLatent, run: Run) -> None:
    CALLS.append(type(op).__name__)
    FUNCTIONS[type(op)](op, run)
    if ZEROS:
        run[op.y].zero_()


EXECUTOR = {Attend: attend, AttendLatent: attend}
