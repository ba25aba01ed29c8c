"""What every flow does first: find the store, claim the run, copy the code, open the cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from flows.changes import changes, require_same_run, told
from flows.home import Home
from flows.spec import PipelineSpec
from slurm.cluster import open_cluster
from slurm.log_retention import sweep_logs
from slurm.snapshot import Snapshot, take_snapshot
from storage import embedded
from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef
from storage.checkpoints.commits import newest_commit
from storage.errors import HeadraceError
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.probe import probe
from storage.records import RunRecord, Stage, new_nonce
from storage.spec import StoreSpec
from tasks.context import RunContext
from tasks.engine import Engine
from tasks.eyes import Eyes

BASE_VARIABLE = "HEADRACE_BASE"


def base_folder() -> Path:
    """What relative paths in a spec are relative to: for a flow that a worker started, the folder
    where `headrace serve` was started, since the flow's own working directory is the code's."""
    return Path(os.environ.get(BASE_VARIABLE) or Path.cwd())


@contextmanager
def open_ledger(spec: PipelineSpec) -> Iterator[tuple[StoreSpec, Ledger]]:
    """The run's ledger, and the store it is in, which stays up for as long as the block lasts."""
    # Whether claims are needed, and where they are, is for the run's record to say.
    plain = spec.store.model_copy(update={"claims": None})
    server = embedded.store_of(plain, workdir=spec.workdir)
    if server is None:
        ledger = _as_begun(_ledger(plain, run=spec.run))
        yield ledger.store.spec, ledger
        return
    with server.in_use() as endpoint:
        store = embedded.resolved(plain, endpoint)
        yield store, _ledger(store, run=spec.run)


@contextmanager
def open_begun(spec: PipelineSpec) -> Iterator[tuple[StoreSpec, Ledger, RunRecord]]:
    """The ledger of a run that was begun, and its record.

    Raises:
        HeadraceError: it was not, as far as this store knows.
    """
    with open_ledger(spec) as (store, ledger):
        record = ledger.run_record()
        if record is None:
            raise HeadraceError(
                f"run {spec.run!r} has no record at {ledger.store.endpoint}, bucket "
                f"{store.bucket}, prefix {store.prefix!r}; check the name, or start it with "
                "`headrace run`"
            )
        yield store, ledger, record


def attempts_at_work(spec: PipelineSpec) -> tuple[Attempt, ...]:
    """The attempts of all runs in the spec's store whose job may need it still.

    A job does not end with its engine; it is known to have ended by its records alone.
    """
    with open_ledger(spec) as (store, ledger):
        prefix = f"{store.prefix}/" if store.prefix else ""
        runs = [
            found.removeprefix(prefix).strip("/") for found in ledger.store.list_prefixes(prefix)
        ]
        return tuple(
            attempt
            for run in runs
            for stage in Stage
            for attempt in _ledger(store, run=run).attempts(stage)
            if attempt.is_at_work
        )


@contextmanager
def open_run(
    spec: PipelineSpec, *, eyes: Eyes, forced: Iterable[Stage] = (), again: bool = False
) -> Iterator[RunContext]:
    """One engine at work on the run that `spec`, whose paths are absolute, names.

    With `again`, what was told when the run was opened before is not told anew.

    Raises:
        SpecError: the run was begun with another spec, and cannot go on with this one.
        HeadraceError: store, cluster or folder cannot be used.
    """
    with open_ledger(spec) as (_, found):
        snapshot = take_snapshot(spec.workdir)
        if (elsewhere := kept_elsewhere(found, spec)) is not None:
            eyes.say(elsewhere)
        record = claim_run(found, spec, snapshot)
        ledger = _as_begun(found)
        Home.of_user().remember_run(spec.run, spec.model_dump_json())
        if not again:
            for line in (*told_changes(ledger, record, spec), *_told_claims(ledger, record)):
                eyes.say(line)
            eyes.say(f"logs: {spec.workdir / spec.run}/<stage>/<attempt>/")
        sweep_workdir(ledger, spec, snapshot, eyes)
        yield RunContext(
            run=spec.run,
            workdir=spec.workdir,
            cluster=open_cluster(spec.cluster, workdir=spec.workdir),
            cluster_spec=spec.cluster,
            retry=spec.retry,
            store=ledger.store.spec,
            ledger=ledger,
            snapshot=snapshot,
            eyes=eyes,
            forced=frozenset(forced),
            engine=Engine(),
        )


def sweep_workdir(ledger: Ledger, spec: PipelineSpec, snapshot: Snapshot, eyes: Eyes) -> None:
    """Removes logs and code that the spec keeps no longer, and says so."""
    removed = sweep_logs(
        spec.workdir,
        spec.run,
        spec.logs,
        code=snapshot.path,
        closed_tokens=lambda: {one.intent.token for stage in Stage for one in ledger.ends(stage)},
    )
    if removed.message:
        eyes.say(removed.message)


def kept_elsewhere(ledger: Ledger, spec: PipelineSpec) -> str | None:
    """What to tell a user whose run of this name has its records in another store than this one.

    Often that is a run of another folder. But who has only named another bucket would wonder why
    the run begins anew.
    """
    known = Home.of_user().known_run(spec.run)
    if known is None or ledger.run_record() is not None:
        return None
    try:
        before = PipelineSpec.model_validate_json(known)
    except ValidationError:
        return None
    if _place(before) == _place(spec):
        return None
    return (
        f"run {spec.run} has no record in {_place(spec)}, so it begins here, at step 0; the run of "
        f"this name that was started from here last has its records in {_place(before)}"
    )


def _place(spec: PipelineSpec) -> str:
    """The store, as a person tells it from another."""
    store = spec.store
    if store.is_embedded:
        return str(store.embedded.directory or spec.workdir / "store")
    return f"{store.endpoint_url or 'AWS'}, bucket {store.bucket}, prefix {store.prefix!r}"


def require_unchanged(spec: PipelineSpec) -> None:
    """Find out, before anything is begun, that a run of this name can go on with this spec.

    Raises:
        SpecError: it was begun with another one.
        HeadraceError: the store cannot be used.
    """
    with open_ledger(spec) as (_, ledger):
        if (found := ledger.run_record()) is not None:
            require_same_run(spec.run, changes(found.spec, spec))


def told_changes(ledger: Ledger, record: RunRecord, spec: PipelineSpec) -> tuple[str, ...]:
    """A line for each field that is not as it was when the run began.

    Raises:
        SpecError: one of them must not change in mid-run.
    """
    found = changes(record.spec, spec)
    require_same_run(spec.run, found)
    if not any(change.rule.alters for change in found):
        return told(found, step=None)
    newest = newest_commit(ledger)
    return told(found, step=None if newest is None else newest.step)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run that another descends from, and the checkpoint that it begins with."""

    run: str
    commit: CommitRef | None = None


def claim_run(
    ledger: Ledger, spec: PipelineSpec, snapshot: Snapshot, *, origin: Origin | None = None
) -> RunRecord:
    """The run's record, made now where there is none; the store is probed before it is relied on.

    Raises:
        SpecError: the run was begun with another spec, and cannot go on with this one.
        StoreError: the store has no conditional writes, and no claims can be made in their place.
    """
    found = ledger.run_record()
    if found is None:
        seen = probe(ledger.store, prefix=ledger.keys.probes)
        if not seen.conditional_writes:
            claims = spec.store.claims or spec.workdir / "claims"
            claims.mkdir(parents=True, exist_ok=True)
            seen, ledger = replace(seen, claims=claims), _claiming(ledger, claims)
        found = ledger.claim_run(
            RunRecord(
                run=spec.run,
                forked_from=None if origin is None else origin.run,
                fork_point=None if origin is None else origin.commit,
                spec=spec.model_dump(mode="json"),
                code=snapshot.digest,
                git_commit=snapshot.git_commit,
                git_dirty=snapshot.git_dirty,
                store_probe=seen.to_json(),
                nonce=new_nonce(),
                at=datetime.now(UTC),
            )
        ).record
    require_same_run(spec.run, changes(found.spec, spec))
    return found


def _as_begun(ledger: Ledger) -> Ledger:
    """The ledger by whose rules the run was begun: with claims in its folder, or without any."""
    record = ledger.run_record()
    claims = None if record is None else record.store_probe.get("claims")
    return _claiming(ledger, None if claims is None else Path(claims))


def _claiming(ledger: Ledger, claims: Path | None) -> Ledger:
    if ledger.store.spec.claims == claims:
        return ledger
    store = ledger.store.spec.model_copy(update={"claims": claims})
    return _ledger(store, run=ledger.keys.run)


def _told_claims(ledger: Ledger, record: RunRecord) -> Iterator[str]:
    """The warning of a run whose store would let two writers overwrite each other."""
    claims = ledger.store.spec.claims
    if claims is not None:
        yield (
            f"warning: the store at {ledger.store.endpoint} has no conditional writes "
            f"({record.store_probe['evidence'][0]}), so claims are made in {claims}; that must be "
            "one folder for this host and all nodes, and the run be carried out by one engine at a "
            "time"
        )


def _ledger(store: StoreSpec, *, run: str) -> Ledger:
    return Ledger(ObjectStore(store), RunKeys(prefix=store.prefix, run=run))
