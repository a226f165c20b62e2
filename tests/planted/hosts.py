"""Bugs of direct lanes, on purpose: the simulation of several peers on each host must find them."""

from functools import partial

from planted import Bug
from ringfold.testing.scenario import run_hosts
from ringfold.testing.simulation import Setup

BUGS: dict[str, Bug] = {
    "direct_forgotten": Bug(
        "a Done that goes straight to all members is not sent to one of them",
        partial(run_hosts, base=Setup(planted="direct_forgotten")),
    ),
    "payload_forgotten": Bug(
        "a small op is committed without the payload of one rank",
        partial(run_hosts, base=Setup(planted="payload_forgotten")),
    ),
}
