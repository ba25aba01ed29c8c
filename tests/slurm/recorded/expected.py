"""What every version is to be understood to say in each situation, and where one differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from slurm.pending import Outlook
from storage.records import Kind


@dataclass(frozen=True, kw_only=True)
class End:
    """An end: the word of the queue and of accounting, codes, and steps with theirs."""

    word: str
    code: str = "0:0"
    derived: str = "0:0"
    steps: Mapping[str, tuple[str, str]]
    nodes: int = 1
    accounting_word: str = ""
    controller_code: str = ""
    controller_derived: str = ""


_ALL_WELL = ("COMPLETED", "0:0")
_TERMINATED = ("CANCELLED", "0:15")
ENDS = {
    "completed": End(word="COMPLETED", steps={"batch": _ALL_WELL, "0": _ALL_WELL}, nodes=2),
    "completed-extern": End(
        word="COMPLETED", steps={"batch": _ALL_WELL, "extern": _ALL_WELL, "0": _ALL_WELL}, nodes=2
    ),
    "failed": End(word="FAILED", code="7:0", steps={"batch": ("FAILED", "7:0"), "0": _ALL_WELL}),
    "step-failed": End(
        word="COMPLETED", derived="3:0", steps={"batch": _ALL_WELL, "0": ("FAILED", "3:0")}, nodes=2
    ),
    "killed": End(word="FAILED", code="0:9", steps={"batch": ("CANCELLED", "0:9")}),
    "unwritable": End(word="FAILED", code="0:53", steps={"batch": ("CANCELLED", "0:53")}),
    "oom-batch": End(
        word="OUT_OF_MEMORY", code="0:125", steps={"batch": ("OUT_OF_MEMORY", "0:125")}
    ),
    "oom-step": End(
        word="FAILED",
        code="1:0",
        derived="0:125",
        steps={"batch": ("FAILED", "1:0"), "0": ("OUT_OF_MEMORY", "0:125")},
    ),
    "oom-step-extern": End(
        word="FAILED",
        code="1:0",
        derived="0:125",
        steps={"batch": ("FAILED", "1:0"), "extern": _ALL_WELL, "0": ("OUT_OF_MEMORY", "0:125")},
    ),
    "cancelled-by-user": End(
        word="CANCELLED",
        accounting_word="CANCELLED by 1001",
        controller_code="0:9",
        steps={"batch": ("CANCELLED", "0:9")},
        nodes=2,
    ),
    "cancelled-by-root": End(
        word="CANCELLED",
        accounting_word="CANCELLED by 0",
        controller_code="0:15",
        steps={"batch": _TERMINATED},
    ),
    "cancelled-pending": End(
        word="CANCELLED", accounting_word="CANCELLED by 1001", steps={}, nodes=0
    ),
    "cancelled-held": End(word="CANCELLED", accounting_word="CANCELLED by 1001", steps={}, nodes=0),
    "requeued-cancelled": End(
        word="CANCELLED", accounting_word="CANCELLED by 1001", steps={}, nodes=0
    ),
    "het-ended": End(
        word="CANCELLED",
        accounting_word="CANCELLED by 1001",
        controller_code="0:15",
        steps={"batch": _TERMINATED},
        nodes=2,
    ),
    "timeout": End(word="TIMEOUT", controller_code="0:15", steps={"batch": _TERMINATED}),
    "preempted": End(
        word="PREEMPTED", controller_code="0:15", steps={"batch": _TERMINATED}, nodes=4
    ),
    "node-fail": End(
        word="NODE_FAIL",
        code="1:0",
        controller_code="0:1",
        derived="0:15",
        steps={"batch": _TERMINATED, "0": _TERMINATED},
        nodes=2,
    ),
    "deadline": End(word="DEADLINE", code="1:0", controller_code="0:1", steps={}, nodes=0),
}

UNLIKE = {
    ("22.05", "node-fail"): replace(
        ENDS["node-fail"],
        code="0:0",
        derived="0:0",
        controller_code="0:15",
        controller_derived="0:15",
        steps={"batch": _TERMINATED, "extern": _ALL_WELL, "0": _TERMINATED},
    ),
    ("23.11", "node-fail"): replace(
        ENDS["node-fail"],
        code="0:0",
        derived="0:0",
        controller_code="0:15",
        controller_derived="0:15",
    ),
}
"""Ends that a version tells with other codes (here until the node that failed is back)."""

NEVER_ELIGIBLE = ("cancelled-held", "deadline")
"""Accounting, asked for a span of time, leaves out jobs that were never ready to start in it."""


KINDS = {
    "oom-batch": Kind.MEMORY,
    "oom-step": Kind.MEMORY,
    "oom-step-extern": Kind.MEMORY,
    "unwritable": Kind.OUTPUT,
    "cancelled-by-user": Kind.OPERATOR,
    "cancelled-pending": Kind.OPERATOR,
    "cancelled-by-root": Kind.SITE,
    "timeout": Kind.TIME,
    "preempted": Kind.PREEMPTED,
    "node-fail": Kind.HARDWARE,
    "killed": Kind.UNKNOWN,
}
"""What an attempt died of that left no word of its own."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """A job that lives: the queue's word, and where it waits, what its reason asks of people."""

    word: str
    nodes: int = 0
    outlook: Outlook | None = None
    unlike: Mapping[str, Outlook] = field(default_factory=dict)


_RUNS, _WAITS, _TELLS, _IS_VAIN = (
    Life(word="RUNNING", nodes=1),
    Life(word="PENDING", outlook=Outlook.WAIT),
    Life(word="PENDING", outlook=Outlook.TELL),
    Life(word="PENDING", outlook=Outlook.GIVE_UP),
)
LIVES = {
    "running": Life(word="RUNNING", nodes=2),
    "suspended": Life(word="SUSPENDED", nodes=2),
    "completing": Life(word="COMPLETING", nodes=1),
    "configuring": Life(word="CONFIGURING", nodes=1),
    "array-running": _RUNS,
    "het-running": Life(word="RUNNING", nodes=2),
    "requeued-running": _RUNS,
    "requeued-waiting": _WAITS,
    "preempted-requeued": _WAITS,
    "requeue-hold": _TELLS,
    "special-exit": Life(word="SPECIAL_EXIT", outlook=Outlook.TELL),
    "pending-resources": _WAITS,
    "pending-priority": _WAITS,
    "pending-begin-time": _WAITS,
    "pending-licenses": _WAITS,
    "pending-qos-max-jobs": _WAITS,
    "pending-dependency": _TELLS,
    "pending-dependency-never": _IS_VAIN,
    "pending-held": _TELLS,
    "pending-array": _TELLS,
    "pending-admin-held": _TELLS,
    "pending-maintenance": _TELLS,
    "pending-node-limit": _TELLS,
    "pending-node-unavailable": _TELLS,
    "pending-nodes-down": _TELLS,
    "pending-partition-down": _TELLS,
    "pending-too-many-cpus": _TELLS,
    "pending-too-many-nodes": _TELLS,
    "pending-account": replace(_TELLS, unlike={"22.05": Outlook.GIVE_UP}),
    "pending-qos-not-allowed": _IS_VAIN,
    "pending-time-limit": _IS_VAIN,
    "bad-constraints": _IS_VAIN,
}


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Patterns of the words for nodes that are not plainly idle, and what is made of those."""

    states: Mapping[str, str]
    silent: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)


NODES = {
    "nodes-mixed": Nodes(states={"n1": "mixed", "n2": "mixed"}),
    "nodes-allocated": Nodes(states=dict.fromkeys(("n1", "n2", "n3", "n4"), "allocated")),
    "nodes-completing": Nodes(states={"n1": "completing"}),
    "nodes-planned": Nodes(
        states={"n1": "allocated", "n2": "planned", "n3": "planned", "n4": "planned"},
        idle=frozenset({"n2", "n3", "n4"}),
    ),
    "nodes-maintenance": Nodes(states={"n3": "maint"}),
    "nodes-reserved": Nodes(states={"n3": "reserved"}),
    "nodes-draining": Nodes(
        states={"n4": "draining"}, reasons={"n4": "bad fan | rack 4, see ticket #12"}
    ),
    "nodes-drained": Nodes(
        states={"n4": "drained"}, reasons={"n4": "bad fan | rack 4, see ticket #12"}
    ),
    "nodes-drained-silent": Nodes(
        states={"n4": r"drained\*"}, silent=frozenset({"n4"}), reasons={"n4": "disk | broken"}
    ),
    "nodes-down": Nodes(
        states={"n4": r"down\*"}, silent=frozenset({"n4"}), reasons={"n4": "Not responding"}
    ),
    "nodes-down-by-hand": Nodes(
        states={"n2": "down"}, silent=frozenset({"n2"}), reasons={"n2": "by hand"}
    ),
    "nodes-fail": Nodes(states={"n2": "fail"}, reasons={"n2": "failing soon"}),
    "nodes-reboot-requested": Nodes(states={"n2": "mixed@"}, reasons={"n2": "reboot requested"}),
    "nodes-powering-down": Nodes(states={"n2": "idle[%!]"}),
    "nodes-powered-down": Nodes(states={"n2": "idle~"}, idle=frozenset({"n2"})),
    "nodes-powering-up": Nodes(states={"n2": "mixed[#~]"}),
}


REJECTED = (
    "bad-account",
    "bad-constraint",
    "bad-dependency",
    "bad-gres",
    "bad-node-name",
    "bad-option",
    "bad-partition",
    "bad-qos",
    "bad-reservation",
    "bad-time",
    "bad-value",
    "big-array",
    "empty-script",
    "inactive-partition",
    "licenses",
    "no-configuration",
    "no-interpreter",
    "no-script",
    "node-limit",
    "past-deadline",
    "time-limit",
    "too-many-cpus",
    "too-many-gpus",
    "too-many-nodes",
    "too-much-memory",
)
FIELDS = {
    "bad-account": "cluster.account",
    "bad-constraint": "cluster.constraint",
    "bad-gres": "cluster.gpus_per_node",
    "bad-node-name": "cluster.exclude",
    "bad-option": "cluster.extra.no-such-option",
    "bad-partition": "cluster.partition",
    "bad-qos": "cluster.qos",
    "bad-reservation": "cluster.reservation",
    "bad-time": "cluster.extra.time",
    "licenses": "cluster.extra.licenses",
    "node-limit": "cluster.nodes",
    "past-deadline": "cluster.time_limit_min",
    "time-limit": "cluster.time_limit_min",
    "too-many-gpus": "gpus_per_node",
    "too-much-memory": "cluster.memory_per_node",
}
"""The field of the spec that a refusal is about, where it is about one."""
ACCEPTED_ALL_THE_SAME = {
    ("22.05", "bad-dependency"),
    ("22.05", "too-many-cpus"),
    ("22.05", "too-many-nodes"),
    ("23.11", "too-many-cpus"),
    ("23.11", "too-many-nodes"),
    ("25.05", "too-many-cpus"),
    ("25.05", "too-many-nodes"),
    ("26.05", "too-many-cpus"),
    ("26.05", "too-many-nodes"),
}
"""What may change before it is the job's turn is not refused by every version."""
