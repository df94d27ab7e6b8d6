"""Work for lanes, in a module that is quickly imported."""

import os
import time


def doubling():
    def work(piece):
        if piece == "end":
            os._exit(3)
        if piece == "sleep":
            time.sleep(600)
        if piece == "raise":
            raise ValueError("a fault of the work itself")
        return 2 * piece

    return work
