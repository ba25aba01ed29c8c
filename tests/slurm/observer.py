"""An engine reduced to its watching, run as a process of its own: `observer.py CONF TOKEN...`.

Prints what it saw and what that cost as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil

from slurm.cluster import JobObservation, JobState
from slurm.spec import ClusterSpec
from slurm.submit import SlurmCluster

SHORTEST_S, LONGEST_S = 0.5, 30.0


def watch(conf: Path, tokens: list[str]) -> dict[str, object]:
    """Looks as often as the loop does, until every job has ended and accounting has told how."""
    cluster = SlurmCluster(ClusterSpec(kind="slurm", slurm_conf=conf))
    process = psutil.Process()
    begin, before = time.monotonic(), process.cpu_times()
    idle_bytes = most_bytes = process.memory_info().rss
    num_looks = num_batches = num_lags = 0
    seen: dict[str, JobObservation] = {}
    while not seen or not all(map(_is_told, seen.values())):
        time.sleep(min(LONGEST_S, max(SHORTEST_S, (time.monotonic() - begin) / 30)))
        ended = {token for token, one in seen.items() if one.state is JobState.ENDED}
        seen = dict(cluster.observe(tokens))
        now_ended = {token for token, one in seen.items() if one.state is JobState.ENDED}
        num_looks += 1
        num_batches += bool(now_ended - ended)
        num_lags += any(not _is_told(seen[token]) for token in now_ended)
        most_bytes = max(most_bytes, process.memory_info().rss)
    after, wall_s = process.cpu_times(), time.monotonic() - begin
    own_s = after.user + after.system - before.user - before.system
    return {
        "pid": os.getpid(),
        "looks": num_looks,
        "batches": num_batches,
        "lags": num_lags,
        "wall_s": wall_s,
        "own_cpu": own_s / wall_s,
        "cpu": (own_s + after.children_user + after.children_system) / wall_s,
        "grown_bytes": most_bytes - idle_bytes,
        "states": {token: one.raw_state for token, one in seen.items()},
        "steps": sum(bool(one.steps) for one in seen.values()),
    }


def _is_told(one: JobObservation) -> bool:
    return one.state is JobState.ENDED and bool(one.exit_code) and bool(one.steps)


if __name__ == "__main__":
    print(json.dumps(watch(Path(sys.argv[1]), sys.argv[2:])))
