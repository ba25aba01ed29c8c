"""`--fork NEW`: a run of its own from a spec that its run may not have, with the weights so far.

The old run's checkpoint is pinned before it is relied on, so that no pruning of that run takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from flows.changes import changes
from flows.opening import Origin, claim_run, open_ledger
from flows.spec import PipelineSpec
from slurm.snapshot import take_snapshot
from storage.checkpoint_records import Commit
from storage.checkpoints.commits import counting_commits, read_journals
from storage.checkpoints.lineage import journaled
from storage.errors import SpecError
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.records import RunRecord, encode

_OTHER_WEIGHTS = ("train.model.", "data.tokenizer", "data.end_of_document")
"""Fields of which a change leaves no meaning in the weights that there are."""


def fork_run(spec: PipelineSpec, new: str, *, say: Callable[[str], None]) -> PipelineSpec:
    """The spec of the run `new`, which descends from the run that `spec` names, begun if need be.

    Asked again for a fork that is there, it only returns its spec.

    Raises:
        SpecError: there is nothing to fork, or `new` is another run; nothing is begun.
        StoreError: the store cannot be used.
    """
    child = _renamed(spec, new)
    with open_ledger(spec) as (store, parent):
        ledger = Ledger(parent.store, RunKeys(prefix=store.prefix, run=new))
        found = ledger.run_record()
        if found is None:
            origin = _origin(parent, child, say=say)
            found = claim_run(ledger, child, take_snapshot(child.workdir), origin=origin)
        _require_fork(found, spec.run)
    say(f"Run {new} is a fork of {spec.run}; put `run: {new}` into the file to go on with it.")
    return child


def _renamed(spec: PipelineSpec, new: str) -> PipelineSpec:
    if new == spec.run:
        raise SpecError(f"--fork {new} must be another name than the run's own; choose a new one")
    try:
        return spec.renamed(new)
    except ValidationError:
        raise SpecError(
            f"--fork {new!r} must be lower-case letters, digits and '-', 48 at most, and begin and "
            "end with a letter or digit; choose another name"
        ) from None


def _require_fork(record: RunRecord, parent: str) -> None:
    if record.forked_from != parent:
        descent = "no fork" if record.forked_from is None else f"a fork of {record.forked_from!r}"
        raise SpecError(
            f"--fork {record.run}: there is a run of this name, and it is {descent}, not of "
            f"{parent!r}; choose another name"
        )


def _origin(parent: Ledger, child: PipelineSpec, *, say: Callable[[str], None]) -> Origin:
    run = parent.keys.run
    record = parent.run_record()
    if record is None:
        raise SpecError(
            f"--fork {child.run}: the store at {parent.store.endpoint} has no run {run!r} to fork "
            "from; check `run` and `store` in the file, which must be the old run's"
        )
    obstacle = _obstacle(record.spec, child)
    if obstacle:
        say(f"Starts from scratch, at step 0: {obstacle}.")
        return Origin(run=run)
    for commit in counting_commits(parent):
        _require_steps_left(child, commit, run=run)
        parent.store.put(f"{parent.keys.pins}fork-{child.run}.json", encode(commit.ref))
        # The pin stands before the journals are read: of a sweeper and us, one sees the other.
        if commit.ref not in journaled(read_journals(parent)):
            say(
                f"Starts with the weights and the optimizer of run {run} at step {commit.step}, "
                "from where its schedule goes on, and at the beginning of its data. That "
                f"checkpoint is pinned in run {run} as fork-{child.run}."
            )
            return Origin(run=run, commit=commit.ref)
    say(f"Starts from scratch, at step 0: run {run} has no checkpoint.")
    return Origin(run=run)


def _obstacle(old: Mapping[str, Any], child: PipelineSpec) -> str:
    """Why the old run's weights are of no use; "" where they are."""
    if child.command is not None or old.get("command") is not None:
        return "what a script of one's own has saved, it alone can load"
    found = [change for change in changes(old, child) if change.field.startswith(_OTHER_WEIGHTS)]
    return "; ".join(f"{one.field} is {one.new} and was {one.old}" for one in found)


def _require_steps_left(child: PipelineSpec, commit: Commit, *, run: str) -> None:
    if child.train.steps <= commit.step:
        raise SpecError(
            f"train.steps {child.train.steps} must be above {commit.step}, the step at which run "
            f"{run!r} is forked; raise it"
        )
