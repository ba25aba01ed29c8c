"""Which nodes a unit's next job avoids, how many it asks for, and when too few or too many are out.

Pure. A unit with a range of nodes takes what is left. Before it takes less than it would because
nodes have failed, it waits a while for them: they may be repaired and pass a validation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from storage.attempts import Attempt
from tasks.attending import LONGEST_POLL_S, history_of
from tasks.context import Unit
from tasks.exclusions import Exclusion
from tasks.situation import Order, Situation

_NODES_TOLD = 12
LEAVING_S = 60.0
"""So long after an attempt's end its nodes may still be cleaned up. Slurm would start the next job
without them."""


def to_avoid(order: Order, seen: Situation, unit: Unit) -> tuple[str, ...]:
    """The nodes that the unit's next job excludes.

    Those that are only suspected are among them as long as there are others. Slurm refuses a job
    that both names and excludes a node, so those who name get no exclusions.
    """
    if unit.node_list:
        return ()
    left = _known(seen) - seen.excluded.keys()
    if order.replaces_nodes or len(left) >= unit.wanted_nodes:
        return tuple(sorted(seen.excluded))
    return tuple(sorted(name for name, one in seen.excluded.items() if one.proven))


def most_to_ask(order: Order, seen: Situation, unit: Unit) -> int | None:
    """How many nodes the next job takes at the most; None where the unit takes one number only."""
    if unit.most_nodes is None or order.replaces_nodes or unit.node_list:
        return unit.most_nodes
    return max(unit.nodes, min(unit.most_nodes, len(_left(seen))))


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Until when an attempt is put off for want of nodes, and how often to look meanwhile."""

    until: datetime
    words: str
    poll_s: float = LONGEST_POLL_S


def awaited(order: Order, seen: Situation, unit: Unit, *, last: Attempt | None) -> Pause | None:
    """The pause before an attempt that would have fewer nodes than it takes; None where it is over.

    It is for nodes that failed: those of cluster.exclude stay out, and an unfit one was found so
    by a validation that let the run go on. And it is for those that the `last` job is leaving.
    """
    if unit.most_nodes is None or order.replaces_nodes or unit.node_list:
        return None
    return _for_failed(order, seen, unit, unit.most_nodes) or _for_leaving(seen, unit, last)


def _for_failed(order: Order, seen: Situation, unit: Unit, most_nodes: int) -> Pause | None:
    known, left = _known(seen), _left(seen)
    out = {
        name: one
        for name, one in seen.excluded.items()
        if one.proven and one.since is not None and name in known
    }
    if not out or len(left) >= most_nodes:
        return None
    newest = max(one.since for one in out.values() if one.since is not None)
    until = newest + timedelta(seconds=order.retry.wait_for_nodes_s)
    if seen.now >= until:
        return None
    return Pause(
        until=until,
        words=f"{unit.name} waits for nodes: it takes up to {most_nodes}, and {len(left)} of "
        f"{len(known)} are left ({_told(out)}); it goes on with fewer at {until:%H:%M:%S %Z} "
        "(retry.wait_for_nodes_s), or when a validation passes them (--force validate)",
    )


def _for_leaving(seen: Situation, unit: Unit, last: Attempt | None) -> Pause | None:
    if last is None or last.end is None or seen.nodes is None:
        return None
    # A suspect may have died under the job, and will not leave it soon.
    usable = [one for one in seen.nodes if one.responds and one.name not in seen.excluded]
    is_leaving = any(node.raw_state.lower().startswith("completing") for node in usable)
    until = last.end.at + timedelta(seconds=LEAVING_S)
    has_enough = sum(node.idle for node in usable) >= unit.wanted_nodes
    if not is_leaving or has_enough or seen.now >= until:
        return None
    return Pause(
        until=until,
        words=f"{unit.name} waits for nodes that attempt {last.number} is leaving",
        poll_s=1.0,
    )


def lack_of_nodes(order: Order, seen: Situation, unit: Unit) -> str | None:
    """Why no job of the unit can be made with the nodes that are left, and what to do about it."""
    if unit.node_list:
        return _lack_of_named_nodes(order, seen, unit)
    if order.replaces_nodes:
        return None
    known = _known(seen)
    out = {name: one for name, one in seen.excluded.items() if one.proven and name in known}
    num_left = len(known) - len(out)
    if num_left < unit.nodes:
        gone = f" ({_told(out)})" if out else ""
        least, which = ("", "") if unit.most_nodes is None else ("at least ", "the least of ")
        return (
            f"{unit.name} needs {least}{unit.nodes} nodes and {num_left} of {len(known)} are left"
            f"{gone}; repair the excluded nodes and validate them again (--force validate), or "
            f"lower {which}cluster.nodes to {num_left}"
        )
    failed = {name: one for name, one in out.items() if one.failed}
    allowed = order.retry.max_excluded_ratio
    if len(failed) > allowed * len(known):
        return (
            f"{len(failed)} of {len(known)} nodes are excluded because attempts failed on them "
            f"({_told(failed)}), and retry.max_excluded_ratio allows {allowed:g} of them; so many "
            "seldom fail by themselves: look at what they share (network, storage, driver) and at "
            "the code, then validate them again (--force validate), or raise "
            "retry.max_excluded_ratio"
        )
    return None


def _known(seen: Situation) -> set[str]:
    assert seen.nodes is not None
    return {node.name for node in seen.nodes}


def _left(seen: Situation) -> set[str]:
    """The nodes that nothing proven keeps out of jobs."""
    return _known(seen) - {name for name, one in seen.excluded.items() if one.proven}


def _told(out: Mapping[str, Exclusion]) -> str:
    names = sorted(out)
    told = [f"{name}: {out[name]}" for name in names[:_NODES_TOLD]]
    more = len(names) - _NODES_TOLD
    return "; ".join([*told, f"and {more} more"] if more > 0 else told)


def _lack_of_named_nodes(order: Order, seen: Situation, unit: Unit) -> str | None:
    unfit = sorted(_blamed(order, seen, unit) & set(unit.node_list))
    if not unfit:
        return None
    return f"{unit.name} must run on {', '.join(unit.node_list)}, and {', '.join(unfit)} failed it"


def _blamed(order: Order, seen: Situation, unit: Unit) -> set[str]:
    ends: Iterable[tuple[str, ...]] = (
        one.end.decision.exclude_nodes
        for one in history_of(seen, unit, order.fingerprint)
        if one.end is not None and one.number not in order.past
    )
    return {name for nodes in ends for name in nodes}
