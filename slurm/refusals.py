"""Why sbatch refused a job, for people: the field of the spec that its words speak of. Pure.

Slurm names what it could not grant, not who asked for it. Words that fit no row stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurm.pending import explain

_SAID = re.compile(r"sbatch: (?:error: |fatal: )?(?:Batch job submission failed: )?(?P<words>.+)")

_FIT = "compare with `sinfo --Node --long`"
_WHOSE = "compare with `sacctmgr show assoc user=$USER`"

# The first row that matches decides: a memory that no node has is told before "node configuration".
_TABLE: Mapping[re.Pattern[str], str] = {
    re.compile(pattern, re.IGNORECASE): words
    for pattern, words in {
        r"option '--(?P<name>[^'=]+)": "cluster.extra.{name}: sbatch knows no such option here; "
        "correct its name or take it out",
        r"Invalid --(?P<name>[a-z-]+) specification": "cluster.extra.{name}: sbatch cannot read "
        "its value; correct it",
        r"partition not available": "cluster.partition: it is out of use; name another, or ask the "
        "administrators",
        r"invalid partition|partition name": "cluster.partition: there is none of this name; "
        "`sinfo --summarize` lists them",
        r"invalid account": f"cluster.account: Slurm does not take it, or not with this "
        f"cluster.partition; {_WHOSE}",
        r"invalid qos": f"cluster.qos: there is none of this name that you may use; {_WHOSE}",
        r"invalid wckey": f"cluster.wckey: Slurm does not know it; {_WHOSE}",
        r"invalid feature": "cluster.constraint: no node has such a feature; `sinfo "
        "--format='%N %f'` lists them",
        r"reservation is invalid|not usable.*reservation": "cluster.reservation: there is none of "
        "this name that you may use; `scontrol show reservation` lists them",
        r"memory specification": f"cluster.memory_per_node: no node has so much; {_FIT}",
        r"CPU count|more processors": "cluster.cpus_per_rank: times cluster.ranks_per_node, it is "
        f"more than a node has; {_FIT}",
        r"generic resource|\bgres\b": "cluster.gpus_per_node (or cluster.extra.gres): no such "
        "device is known here; `sinfo --format='%N %G'` lists them",
        r"node count": "cluster.nodes: the partition takes no jobs of so many nodes; `scontrol "
        "show partition` says how many",
        r"time limit": "cluster.time_limit_min: the partition takes no jobs so long; `scontrol "
        "show partition` says how long",
        r"license": "cluster.extra.licenses: they are not known here; `scontrol show licenses` "
        "lists them",
        r"node name": "cluster.exclude: Slurm knows no node of one of these names; `sinfo --Node` "
        "lists them",
        r"node configuration": "cluster: no node has all at once that gpus_per_node, "
        f"cpus_per_rank × ranks_per_node, memory_per_node and constraint ask for; {_FIT}",
    }.items()
}


def said_by_sbatch(message: str) -> str:
    """Slurm's words in `message`, without what sbatch puts before every error."""
    return "; ".join(dict.fromkeys(found["words"].strip() for found in _SAID.finditer(message)))


def explain_refusal(message: str) -> str:
    """The spec's field and what to do about it; "" where sbatch's words tell of none.

    A limit of accounting is told as it is of a job that waits for it.
    """
    said = said_by_sbatch(message)
    for name in said.split("; "):
        if words := explain(name).words:
            return words
    for pattern, words in _TABLE.items():
        if (found := pattern.search(said)) is not None:
            return words.format(**found.groupdict())
    return ""
