"""Fixed shares that do not bind, on purpose: the simulation of shares must find them (see `planted.py`)."""

from functools import partial

from planted import Bug
from ringfold.testing.sharing import run_shares
from ringfold.testing.simulation import Setup

BUGS: dict[str, Bug] = {
    "shares_expire": Bug(
        "fixed shares count for the first segments of an op only",
        partial(run_shares, base=Setup(planted="shares_expire")),
    ),
}
