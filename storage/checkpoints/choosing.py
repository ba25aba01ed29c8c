"""Which checkpoint a job resumes from, and why not a newer one; loads no torch.

The newest commit that counts, that nothing speaks against, and that no sweep is about to delete.
Where commits exist and none of them will do, that is an error which lists them all: never a silent
start at step 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime

from storage.attempts import Attempt
from storage.checkpoint_records import Commit, CommitRef, Loading
from storage.checkpoints.commits import (
    UnreadableCommit,
    commit_places,
    iter_commits,
    loading_key,
    look_at_commit,
    read_journals,
)
from storage.checkpoints.lineage import Place, counting, journaled, poisoned, trace
from storage.checkpoints.quarantine import quarantined
from storage.errors import CheckpointError
from storage.ledger import Ledger
from storage.records import Intent, Stage, encode

CANDIDATES = 8
LISTED = 20


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A commit that is passed over, and why. `save` is None where the commit cannot be read."""

    step: int
    attempt: int
    save: str | None
    reason: str

    def __str__(self) -> str:
        return f"{name_of(self.step, self.attempt, self.save)}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to load, None for a start at step 0, and the newer ones that were passed over."""

    commit: Commit | None
    passed: tuple[Passed, ...]


@dataclass(frozen=True, kw_only=True)
class _Look:
    """The newest few commits that may be loaded, and those before them that may not.

    `places` are those of all commits that were there.
    """

    candidates: tuple[Commit, ...]
    passed: tuple[Passed, ...]
    places: frozenset[Place]

    def excuses(self, floor: CommitRef) -> bool:
        """Whether something is known that allows to step back from the floor."""
        return any(
            (each.step, each.attempt) == (floor.step, floor.attempt)
            and each.save in (None, floor.save)
            for each in self.passed
        )


def choose(
    ledger: Ledger,
    intent: Intent,
    *,
    damaged: Mapping[CommitRef, str],
    swept: Set[CommitRef] = frozenset(),
) -> Choice:
    """The checkpoint that the attempt of `intent` is to load now. Puts the attempt's marker.

    `damaged` are those that its ranks tried to load and could not, `swept` those that were deleted
    under its hands. The marker goes first and the journals are read after it, so that of a reader
    and a sweeper at least one sees the other.

    Raises:
        CheckpointError: commits exist and none will do; or the floor is gone and nothing newer is
            there.
    """
    floor = intent.floor
    if floor is not None and intent.ceiling is not None and floor.step > intent.ceiling:
        floor = None
    while True:
        look = _look(ledger, intent, floor=floor, damaged=damaged, swept=swept)
        marker = Loading(candidates=tuple(each.ref for each in look.candidates), at=_now())
        ledger.store.put(loading_key(ledger, intent.attempt), encode(marker))
        journals = journaled(read_journals(ledger))
        standing = [commit for commit in look.candidates if commit.ref not in journals]
        # Before a start at step 0: what a late flusher has committed meanwhile is still in time.
        if standing or (not look.candidates and look.places.issuperset(commit_places(ledger))):
            break
    newest = standing[0] if standing else None
    if floor is not None and floor not in {commit.ref for commit in standing}:
        _require_floor(ledger, floor, newest, look)
    if newest is None:
        _require_fresh(ledger, intent, look)
    passed = tuple(each for each in look.passed if newest is None or each.step >= newest.step)
    return Choice(commit=newest, passed=passed)


def may_resume_from(
    ledger: Ledger, intent: Intent, refs: Sequence[CommitRef]
) -> tuple[CommitRef, ...]:
    """Those of these saves, of whatever tier, that a commit of the same name would count for.

    That the store's copy is damaged says nothing of another one. But what follows a checkpoint that
    may be poison is as suspect as that.
    """
    if not refs:
        return ()
    attempts = ledger.outlines(Stage.TRAIN)
    poison = poisoned(attempts, commit_places(ledger), fingerprint=intent.fingerprint)
    suspect_from = min((ref.step for ref in poison), default=None)
    journals = read_journals(ledger)
    return tuple(
        ref
        for ref in counting(refs, attempts, journals, ceiling=intent.ceiling)
        if suspect_from is None or ref.step < suspect_from
    )


def why_swept(ledger: Ledger, ref: CommitRef) -> str | None:
    """Why a checkpoint whose bytes were not found as expected does not count any more.

    None means that it still does, and so is damaged: a sweeper deletes commits, then data, and
    journals both before.
    """
    found = look_at_commit(ledger, attempt=ref.attempt, step=ref.step)
    if found is None or (isinstance(found, Commit) and found.ref != ref):
        return "its commit was deleted while it was being read"
    if ref in journaled(read_journals(ledger)):
        return "a sweep took it while it was being read"
    return None


def name_of(step: int, attempt: int, save: str | None) -> str:
    return f"the checkpoint of step {step} (attempt {attempt}, save {save or 'unknown'})"


def _look(
    ledger: Ledger,
    intent: Intent,
    *,
    floor: CommitRef | None,
    damaged: Mapping[CommitRef, str],
    swept: Set[CommitRef],
) -> _Look:
    attempts = ledger.outlines(Stage.TRAIN)
    places = tuple(commit_places(ledger))
    against = {
        **poisoned(attempts, places, fingerprint=intent.fingerprint),
        **quarantined(ledger),
        **damaged,
    }
    candidates: list[Commit] = []
    passed: list[Passed] = []
    for commit in iter_commits(
        ledger,
        attempts,
        read_journals(ledger),
        ceiling=intent.ceiling,
        places=places,
        also=() if floor is None else (floor,),
    ):
        if isinstance(commit, UnreadableCommit):
            passed.append(
                Passed(step=commit.step, attempt=commit.attempt, save=None, reason=commit.fault)
            )
        elif commit.ref in against:
            passed.append(_passed(commit.ref, against[commit.ref]))
        elif commit.ref not in swept:
            candidates.append(commit)
        if len(candidates) == CANDIDATES:
            break
    return _Look(candidates=tuple(candidates), passed=tuple(passed), places=frozenset(places))


def _require_floor(ledger: Ledger, floor: CommitRef, newest: Commit | None, look: _Look) -> None:
    """A floor that is damaged or doubted may be stepped back from; one that is gone may not.

    Nor is one gone that stands off the lineage, since an attempt after it resumed from another.
    """
    if look.excuses(floor) or (newest is not None and newest.step >= floor.step):
        return
    lineage = trace(ledger.outlines(Stage.TRAIN))
    found = look_at_commit(ledger, attempt=floor.attempt, step=floor.step)
    is_there = isinstance(found, Commit) and found.ref == floor
    if is_there and not lineage.admits(attempt=floor.attempt, step=floor.step):
        return
    raise CheckpointError(
        f"the newest commit known when this attempt was made, {_name(floor)}, is gone, and nothing "
        "newer counts; look for who deleted it, and restore it or start a run under a new name; "
        f"`headrace checkpoints ls {ledger.keys.run}` shows what is there" + _list(look.passed)
    )


def _require_fresh(ledger: Ledger, intent: Intent, look: _Look) -> None:
    """Nothing can be loaded: that is right only for a run that has never committed anything."""
    if intent.ceiling == 0:
        return
    attempts = ledger.outlines(Stage.TRAIN)
    lineage = trace(attempts)
    places = [
        (step, attempt)
        for step, attempt in look.places
        if lineage.admits(attempt=attempt, step=step)
    ]
    resumed = any(_has_used_a_commit(one) for one in attempts if one.number in lineage.last_steps)
    if not (look.passed or places or resumed):
        return
    known = {(each.step, each.attempt) for each in look.passed}
    others = [_other(ledger, place, intent) for place in places if place not in known]
    passed = sorted((*look.passed, *others), key=lambda each: (-each.step, -each.attempt))
    ceiling = intent.ceiling
    run = ledger.keys.run
    raise CheckpointError(
        "the run has commits"
        + ("" if ceiling is None else f", with a ceiling at step {ceiling},")
        + f" and none of them can be loaded; see `headrace checkpoints ls {run}`, have those that "
        f"may be whole read by `headrace checkpoints verify {run}`, which takes them out of "
        "quarantine, restore one, or start a run under a new name" + _list(passed)
    )


def _has_used_a_commit(attempt: Attempt) -> bool:
    """Whether one stood when it resumed. A save that it found on disk need not be committed."""
    resume = attempt.resume
    if resume is None or resume.source is None:
        return False
    return not resume.from_disk or attempt.intent.floor is not None


def _other(ledger: Ledger, place: Place, intent: Intent) -> Passed:
    """Why a commit that stands on the lineage was not even looked at."""
    step, attempt = place
    if intent.ceiling is not None and step > intent.ceiling:
        return Passed(step=step, attempt=attempt, save=None, reason="beyond the ceiling")
    found = look_at_commit(ledger, attempt=attempt, step=step)
    save = found.save if isinstance(found, Commit) else None
    return Passed(step=step, attempt=attempt, save=save, reason="a sweep has named it")


def _passed(ref: CommitRef, reason: str) -> Passed:
    return Passed(step=ref.step, attempt=ref.attempt, save=ref.save, reason=reason)


def _name(ref: CommitRef) -> str:
    return name_of(ref.step, ref.attempt, ref.save)


def _list(passed: tuple[Passed, ...] | list[Passed]) -> str:
    """On the same line: of an exception's text the last line alone is quoted elsewhere."""
    told = [str(each) for each in passed[:LISTED]]
    if len(passed) > LISTED:
        told.append(f"and {len(passed) - LISTED} older ones")
    return f": {'; '.join(told)}" if told else ""


def _now() -> datetime:
    return datetime.now(UTC)
