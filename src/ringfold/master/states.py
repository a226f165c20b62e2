"""The states of a master's machines, and every legal transition of them. `ringfold.states` says how a table works.

An epoch change (`epochs.py`), one for each group:

    IDLE --any cause--> SEALING --all live members sealed--> ATTACHING --all live members attached--> IDLE
                         |  ^                                    |
                         |  +------- any cause, failed edge -----+
                         +--no member is left--> IDLE

A peer's membership (`run.py`). A peer only moves forward; a peer that joins again gets a new id:

    REGISTERED --a vote admits it--> ADMITTED --its first epoch is recorded--> MEMBER --Leave--> LEAVING
    RESUMING --Returned, after a change of masters-----------------------------^
    any of them --left, lost or evicted--> GONE

A run's life (`lifecycle.py`). The default run starts a new incarnation after its end; a named run ends once:

    NEW --the first members--> RUNNING --the last member left, its program done--> FINISHED --new incarnation--> NEW
                                 |  ^
                                 |  +--the state is back, or given up--+
                                 |                                     |
                                 +--the last member is gone--> ABANDONED --members without its state--> RESUMING
                                                                  |   ^                                   |
                                                                  |   +-------the last member is gone-----+
                                                                  +--no state to resume--> NEW

Topology optimisation (`topology.py`):

    MEASURING --no test is left, rings are chosen--> INSTALLING
"""

from enum import Enum

from ringfold.states import Transitions


class EpochPhase(Enum):
    """The phase of a group between one epoch and the next."""

    IDLE = "idle"
    """The newest epoch is installed, or the group is empty."""
    SEALING = "sealing"
    """The members seal the newest epoch."""
    ATTACHING = "attaching"
    """The record of the newest epoch is sent; its members connect."""


EPOCH_PHASES = Transitions(
    {
        EpochPhase.IDLE: {EpochPhase.SEALING},
        EpochPhase.SEALING: {EpochPhase.ATTACHING, EpochPhase.IDLE},
        EpochPhase.ATTACHING: {EpochPhase.IDLE, EpochPhase.SEALING},
    }
)


class Membership(Enum):
    """What a peer is in its group."""

    REGISTERED = "registered"
    """It waits to be admitted."""
    ADMITTED = "admitted"
    """A vote admitted it; its first epoch is being made."""
    RESUMING = "resuming"
    """It was a member under the last master, and has not sent yet what it knows."""
    MEMBER = "member"
    """It is in its group's newest epoch."""
    LEAVING = "leaving"
    """A member that leaves with the next record."""
    GONE = "gone"


MEMBERSHIPS = Transitions(
    {
        Membership.REGISTERED: {Membership.ADMITTED, Membership.GONE},
        Membership.ADMITTED: {Membership.MEMBER, Membership.GONE},
        Membership.RESUMING: {Membership.MEMBER, Membership.GONE},
        Membership.MEMBER: {Membership.LEAVING, Membership.GONE},
        Membership.LEAVING: {Membership.GONE},
        Membership.GONE: set(),
    }
)


class RunPhase(Enum):
    """Where a run is in its life."""

    NEW = "new"
    """This incarnation has had no member."""
    RUNNING = "running"
    """It has members."""
    RESUMING = "resuming"
    """It has members again after it was abandoned, and none of them has brought its state back yet."""
    FINISHED = "finished"
    ABANDONED = "abandoned"


RUN_PHASES = Transitions(
    {
        RunPhase.NEW: {RunPhase.RUNNING},
        RunPhase.RUNNING: {RunPhase.FINISHED, RunPhase.ABANDONED},
        RunPhase.RESUMING: {RunPhase.RUNNING, RunPhase.FINISHED, RunPhase.ABANDONED},
        RunPhase.FINISHED: {RunPhase.NEW},
        RunPhase.ABANDONED: {RunPhase.NEW, RunPhase.RESUMING},
    }
)


class OptimisationStage(Enum):
    """What an `optimize_topology` in progress does."""

    MEASURING = "measuring"
    """Links without a figure are measured, round by round."""
    INSTALLING = "installing"
    """The rings are chosen; the epochs that have them are being installed."""


OPTIMISATION_STAGES = Transitions(
    {OptimisationStage.MEASURING: {OptimisationStage.INSTALLING}, OptimisationStage.INSTALLING: set()}
)
