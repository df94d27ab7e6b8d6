"""The profile `same` of Hypothesis: the same examples in every run.

Hypothesis also draws constants from all modules of the project. It would parse them in each worker process, which takes
8 s of CPU time, and a new constant in one module would change the examples of tests of other modules.
"""

from hypothesis import settings
from hypothesis.internal.conjecture import providers

collected = providers._get_local_constants


def local_constants() -> providers.Constants:
    """Return the constants of modules that examples may contain: none with the profile `same`."""
    return providers.Constants() if settings.get_current_profile_name() == "same" else collected()


def use_same_examples() -> None:
    settings.register_profile("same", derandomize=True)
    settings.load_profile("same")
    providers._get_local_constants = local_constants
