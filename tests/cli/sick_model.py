"""A sick model that the command line is pointed at."""

from tests.bugs.zoo import ZOO


def build():
    return next(bug for bug in ZOO if bug.id == "no_causal_mask").build()
