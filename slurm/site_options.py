"""Which further options of sbatch a spec may give: all but those that Headrace itself relies on.

sbatch takes unknown things from plug-ins, and long options by any beginning that is unambiguous, so
this says what is refused, not what is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Value = bool | int | str

MAX_CHARACTERS = 1000

_NAME = re.compile(r"[a-z][a-z0-9-]*")

_FIELDS: Mapping[str, str] = {
    "account": "cluster.account",
    "constraint": "cluster.constraint",
    "container": "cluster.container",
    "cpus-per-gpu": "cluster.cpus_per_rank",
    "cpus-per-task": "cluster.cpus_per_rank",
    "exclude": "cluster.exclude",
    "gpus": "cluster.gpus_per_node",
    "gpus-per-node": "cluster.gpus_per_node",
    "gpus-per-socket": "cluster.gpus_per_node",
    "gpus-per-task": "cluster.gpus_per_node",
    "mem": "cluster.memory_per_node",
    "mem-per-cpu": "cluster.memory_per_node",
    "mem-per-gpu": "cluster.memory_per_node",
    "mpi": "cluster.mpi",
    "nodefile": "validation.nodes",
    "nodelist": "validation.nodes",
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes and cluster.ranks_per_node",
    "ntasks-per-core": "cluster.ranks_per_node",
    "ntasks-per-gpu": "cluster.ranks_per_node",
    "ntasks-per-node": "cluster.ranks_per_node",
    "ntasks-per-socket": "cluster.ranks_per_node",
    "partition": "cluster.partition",
    "qos": "cluster.qos",
    "reservation": "cluster.reservation",
    "signal": "cluster.signal_lead_s",
    "tasks-per-node": "cluster.ranks_per_node",
    "time": "cluster.time_limit_min",
    "wckey": "cluster.wckey",
}
"""Options that have a field of their own in the spec."""

_OURS: Mapping[str, str] = {
    "array": "every job is one attempt",
    "begin": "a job that is tried again would wait anew; schedule the run (`headrace schedule`)",
    "chdir": "a job works in the attempt's folder, below workdir",
    "clusters": "jobs are looked for on the cluster of cluster.slurm_conf; name that",
    "dependency": "it would bind every later attempt too; start the run itself after that job",
    "error": "the log is in the attempt's folder, below workdir",
    "export": "what jobs see of the environment is an allow-list; add to it with cluster.env",
    "export-file": "what jobs see of the environment is an allow-list; add to it with cluster.env",
    "get-user-env": "what jobs see of the environment is an allow-list; use cluster.env or .setup",
    "gid": "jobs are those of the user who runs Headrace",
    "help": "nothing would be submitted",
    "hold": "nobody would release the job",
    "ignore-pbs": "the script holds none",
    "input": "jobs read no input",
    "job-name": "it is the attempt's token, by which its job is found again",
    "kill-on-bad-exit": "a job always ends at its first bad exit",
    "no-kill": "a job that loses a node must end to be resumed on others",
    "no-requeue": "it is always given, as retries have one owner",
    "open-mode": "logs are always appended to",
    "output": "the log is in the attempt's folder, below workdir",
    "parsable": "sbatch's answer is read by Headrace",
    "quiet": "sbatch's answer is read by Headrace",
    "requeue": "retries have one owner, which is Headrace; see the spec's retry block",
    "test-only": "nothing would be submitted; `headrace plan` shows what would be",
    "uid": "jobs are those of the user who runs Headrace",
    "usage": "nothing would be submitted",
    "verbose": "sbatch's answer is read by Headrace",
    "version": "nothing would be submitted",
    "wait": "sbatch has to return at once",
    "wrap": "the script is Headrace's",
}
"""Options that Headrace relies on, each with what follows from that."""

_FREE = frozenset(
    {
        "acctg-freq", "batch", "bb", "bbf", "cluster-constraint", "comment", "contiguous",
        "core-spec", "cores-per-socket", "cpu-freq", "deadline", "delay-boot", "distribution",
        "exclusive", "extra", "extra-node-info", "gpu-bind", "gpu-freq", "gres", "gres-flags",
        "hint", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label",
        "mem-bind", "mincpus", "network", "nice", "oom-kill-step", "overcommit", "oversubscribe",
        "power", "prefer", "priority", "profile", "propagate", "reboot", "resv-ports", "segment",
        "sockets-per-node", "spread-job", "stepmgr", "switches", "thread-spec", "threads-per-core",
        "time-min", "tmp", "tres-bind", "tres-per-task", "use-min-nodes", "wait-all-nodes",
    }
)  # fmt: skip
"""Options that sbatch knows under exactly these names, though some begin another one's."""

_SHORT: Mapping[str, str] = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile",
    "G": "gpus", "H": "hold", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes",
    "O": "overcommit", "Q": "quiet", "S": "core-spec", "V": "version", "W": "wait", "a": "array",
    "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error", "h": "help", "i": "input",
    "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition", "q": "qos",
    "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip


def checked_extra(extra: Mapping[object, object]) -> dict[str, Value]:
    """The options under sbatch's own long names, `{"switches": "1@10:00", "exclusive": True}`.

    `true` gives an option without a value, `false` leaves it out.

    Raises:
        ValueError: one of them is refused; the text names it, and what to write in its place.
    """
    checked: dict[str, Value] = {}
    for given, value in extra.items():
        name = _long_name(given)
        if name in checked:
            raise ValueError(f"extra: `{given}` and another key both name --{name}; keep one")
        _refuse_what_is_ours(name, given)
        checked[name] = _checked_value(given, value)
    return checked


def sbatch_options(extra: Mapping[str, Value]) -> dict[str, Value]:
    """The options as a script's lines hold them: sbatch takes a backslash away, in quotes too."""
    return {
        name: value.replace("\\", "\\\\") if isinstance(value, str) else value
        for name, value in extra.items()
        if value is not False
    }


def _long_name(given: object) -> str:
    word = str(given).strip().lstrip("-")
    if len(word) == 1:
        long = _SHORT.get(word)
        remedy = f"write `{long}`" if long else "write its long name"
        raise ValueError(f"extra: `{given}` must be the long name of an sbatch option; {remedy}")
    name = word.replace("_", "-")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"extra: `{given}` must be the long name of an sbatch option, of lower-case letters, "
            "digits and '-', without its value; write it as in `switches: 1@00:10:00`"
        )
    return name


def _refuse_what_is_ours(name: str, given: object) -> None:
    if name.startswith("container"):
        raise ValueError(f"extra: `{given}` has a field of its own; use cluster.container")
    if name in _FREE:
        return
    reserved = {**_OURS, **_FIELDS}
    meant = name if name in reserved else next((o for o in reserved if o.startswith(name)), None)
    if meant is None:
        return
    short = "" if meant == name else f", which sbatch reads as --{meant},"
    if meant in _FIELDS:
        raise ValueError(
            f"extra: `{given}`{short} has a field of its own; use {_FIELDS[meant]} instead"
        )
    raise ValueError(f"extra: `{given}`{short} is Headrace's own: {_OURS[meant]}; remove it")


def _checked_value(given: object, value: object) -> Value:
    if isinstance(value, bool | int):
        return value
    if not isinstance(value, str):
        raise ValueError(
            f"extra: `{given}` has the value {value!r}, and must have text, a whole number, or "
            "true for an option without a value; put it in quotes"
        )
    if not value.strip() or not value.isprintable() or len(value) > MAX_CHARACTERS:
        raise ValueError(
            f"extra: `{given}` has the value {value!r}, and must have 1 to {MAX_CHARACTERS} "
            "characters on one line; change it, or write true for an option without a value"
        )
    return value
