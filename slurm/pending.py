"""Why a job waits, for people: what Slurm's reason means, who can do what, and whether it helps.

Most reasons pass by themselves. Some need a person, who is told. A few are never mended by waiting:
what was asked for does not fit this site, so the attempt is given up with these words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Outlook(StrEnum):
    """What a reason asks of whoever watches the job."""

    WAIT = "wait"
    TELL = "tell"
    GIVE_UP = "give up"


@dataclass(frozen=True, kw_only=True)
class PendingReason:
    """A reason in Slurm's words (`name`, without its particulars) and in ours."""

    name: str
    outlook: Outlook
    words: str

    def __str__(self) -> str:
        return f"{self.name}: {self.words}" if self.words else self.name


@dataclass(frozen=True, kw_only=True)
class _Row:
    """`of_partition`: it is said of one partition, and another may take the job all the same."""

    names: re.Pattern[str]
    outlook: Outlook
    words: str
    of_partition: bool = False


def _row(outlook: Outlook, names: str, words: str, *, of_partition: bool = False) -> _Row:
    return _Row(
        names=re.compile(names, re.IGNORECASE),
        outlook=outlook,
        words=words,
        of_partition=of_partition,
    )


_WAIT, _TELL, _GIVE_UP = Outlook.WAIT, Outlook.TELL, Outlook.GIVE_UP
_RENEWED = "an administrator, or the next accounting period, has to renew it"
_TO_RELEASE = "`scontrol release` lets it go on, or cancel it"

# The first row whose names match the whole reason decides. The names are those of 22.05 to 25.05.
_TABLE = (
    _row(_WAIT, "Priority", "jobs of higher priority come first"),
    _row(
        _WAIT, "Resources", "the nodes that it needs are in use, and it starts when they are free"
    ),
    _row(_WAIT, "None", "Slurm has not looked at it yet"),
    _row(_WAIT, "SchedDefer", "it is not tried at once but in a later round of the scheduler"),
    _row(_WAIT, "JobArrayTaskLimit", "as many elements of its array run as may run at once"),
    _row(_WAIT, "BeginTime", "its earliest begin has not come; after a requeue that takes minutes"),
    _row(_WAIT, "Cleaning", "what an earlier start of it left is being cleaned up"),
    _row(_WAIT, "Prolog", "the site's prolog is preparing its nodes"),
    _row(_WAIT, "Licenses", "the licences that it needs are in use"),
    _row(_WAIT, "FedJobLock", "the clusters of a federation are settling where it runs"),
    _row(_WAIT, "BurstBuffer(Resources|StageIn)", "its burst buffer is being prepared"),
    _row(_WAIT, "Power(NotAvail|Reserved)", "the site's power budget is used up for now"),
    _row(_WAIT, "Reservation", "the reservation that it names has not begun, or is full"),
    _row(
        _TELL,
        "Dependency",
        "it waits for another job, which Headrace never asks for: see `scontrol show job`",
    ),
    _row(_GIVE_UP, "DependencyNeverSatisfied", "the job that it depends on failed: it never runs"),
    _row(_TELL, "JobHeldUser", f"you, or a script of yours, put it on hold: {_TO_RELEASE}"),
    _row(_TELL, "JobHeldAdmin", "an administrator put it on hold and has to release it: ask why"),
    _row(_TELL, "JobHoldMaxRequeue", f"it was requeued too often and is held: {_TO_RELEASE}"),
    _row(
        _GIVE_UP,
        "launch (failed|failure limit exceeded) requeued held",
        "Slurm could not launch it and holds it for good: the job's folder cannot be written "
        "there, or the node's prolog fails; slurmd's log on the node says which",
    ),
    _row(
        _TELL,
        ".*requeued.* held( state)?|JobLaunchFailure|SystemFailure",
        f"Slurm failed to start it; slurmd's log on the node says why: {_TO_RELEASE}",
    ),
    _row(
        _TELL,
        "ReqNodeNotAvail|NodeDown|Nodes required for job are DOWN.*",
        "nodes that it needs are down, drained, or reserved for maintenance; it starts when they "
        "are back: `sinfo -R` and `scontrol show reservation` say more",
    ),
    _row(
        _TELL,
        "PartitionDown",
        "its partition takes jobs but starts none, perhaps for maintenance; it starts when an "
        "administrator opens the partition",
    ),
    _row(
        _TELL,
        "PartitionInactive",
        "its partition is out of use until an administrator opens it; cluster.partition may name "
        "another",
    ),
    _row(
        _TELL,
        "PartitionNodeLimit|PartitionConfig",
        "it does not fit the partition's limits, or too many of the partition's nodes are down: "
        "compare `scontrol show partition` and `sinfo` with the spec",
    ),
    _row(
        _TELL,
        "Constraints",
        "no nodes that are up are what it asks for: compare cluster.constraint with `sinfo`",
    ),
    _row(
        _TELL,
        "Reservation(Deleted|Invalid)",
        "its reservation is gone and Slurm holds it: correct cluster.reservation and cancel it",
    ),
    _row(_TELL, "FrontEndDown", "a machine that starts jobs is down: ask the administrators"),
    _row(_TELL, "BurstBufferOperation", "its burst buffer failed: ask the administrators"),
    _row(_TELL, "DeadLine", "it can no longer end before its deadline"),
    # Slurm may say these two while it has lost touch with accounting, and take them back.
    _row(
        _TELL,
        "InvalidAccount",
        "Slurm does not know its account: compare cluster.account with `sacctmgr show assoc "
        "user=$USER`; while accounting is down this may pass",
    ),
    _row(
        _TELL,
        "InvalidQOS",
        "Slurm does not know its QOS: compare cluster.qos with `sacctmgr show assoc user=$USER`; "
        "while accounting is down this may pass",
    ),
    _row(
        _GIVE_UP,
        "BadConstraints",
        "no nodes of this cluster are what it asks for: correct cluster.constraint, or the nodes, "
        "CPUs, GPUs and memory that the spec asks for",
    ),
    _row(
        _GIVE_UP,
        "PartitionTimeLimit",
        "it asks for more time than the partition allows: lower cluster.time_limit_min, or name "
        "another partition in cluster.partition",
        of_partition=True,
    ),
    _row(
        _GIVE_UP,
        "AccountNotAllowed|Job's account not permitted.*",
        "the partition does not take its account: correct cluster.account or cluster.partition",
        of_partition=True,
    ),
    _row(
        _GIVE_UP,
        "QOSNotAllowed|Job's QOS not permitted.*",
        "its QOS is not allowed there: correct cluster.qos or cluster.partition",
        of_partition=True,
    ),
    _row(
        _GIVE_UP,
        "(QOS|Assoc)Max.*Per(Job|Node)(Limit)?|MaxMemPerLimit",
        "a single job may not ask for so much here: ask for less, or name another account, QOS or "
        "partition",
        of_partition=True,
    ),
    _row(
        _GIVE_UP,
        "QOSMin.*",
        "the QOS takes no jobs as small as this one: ask for more, or name another in cluster.qos",
        of_partition=True,
    ),
    _row(_WAIT, "(QOS|Assoc)Grp.*RunMin.*", "your group's running jobs have claimed its budget"),
    _row(_TELL, "(QOS|Assoc)Grp.*Min.*|(QOS|Assoc)GrpWall.*", f"the budget is used up: {_RENEWED}"),
    _row(_TELL, "(QOS|Association)TimeLimit", f"no time is left to it: {_RENEWED}"),
    _row(_TELL, "QOSUsageThreshold", "your usage is above what the QOS lets through; it decays"),
    _row(
        _WAIT,
        "(QOS|Assoc|Association)(Grp|Max|Job|Resource).*|Max.*PerAccount",
        "your jobs, or your group's, already use all that they may at once; it starts when some "
        "of them end",
    ),
    _row(_TELL, "AccountingPolicy", f"a limit of accounting stops it: {_RENEWED}"),
)

_PARTICULARS = re.compile(r"(?P<name>[^,(]+)[,(]\s*(?:UnavailableNodes:(?P<nodes>[^)]*)|.*)")


def explain(reason: str, *, one_partition: bool = True) -> PendingReason:
    """What squeue's reason (`%r`) means; one that is not known is waited for.

    Without `one_partition` the job may be taken by several, and Slurm's reason is of one of them.
    """
    name = reason.strip()
    row, nodes = _find(name), ""
    split = _PARTICULARS.fullmatch(name)
    if row is None and split is not None:
        name, nodes = split["name"].strip(), split["nodes"] or ""
        row = _find(name)
    if row is None:
        return PendingReason(name=reason.strip(), outlook=Outlook.WAIT, words="")
    is_proof = one_partition or not row.of_partition
    return PendingReason(
        name=name,
        outlook=row.outlook if is_proof else Outlook.TELL,
        words=f"{row.words} (not available: {nodes})" if nodes else row.words,
    )


def _find(name: str) -> _Row | None:
    return next((row for row in _TABLE if row.names.fullmatch(name)), None)
