"""Why a run stands where it stands: its attempts, told to a person who comes the next morning.

`gather` reads, `explain` is pure, and `Line.wrapped` makes columns of it; colours are the caller's.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from enum import Enum
from pathlib import Path

from slurm.cluster import JobObservation
from storage.attempts import Attempt
from storage.checkpoints.commits import commit_places
from storage.ledger import Ledger
from storage.records import Action, Kind, Refusal, RunRecord, Stage, StageRecord
from tasks.attending import FINAL
from tasks.durations import spell_duration
from tasks.last_word import LastWord, Standing, last_word
from tasks.waiting import waits_for

EVIDENCE_LINES = 6
DONE_SHOWN = 8
_LABEL = 10


class Tone(Enum):
    """How a line is meant, for whoever gives it a colour."""

    PLAIN = "plain"
    TITLE = "title"
    GOOD = "good"
    BAD = "bad"
    UNDECIDED = "undecided"
    FAINT = "faint"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One thing that is said. A label, where there is one, stands before it in its own column."""

    text: str
    tone: Tone = Tone.PLAIN
    label: str | None = None
    indent: int = 0

    def wrapped(self, width: int) -> list[str]:
        """The line in rows of `width` columns. No word is broken: a path stays one."""
        head = " " * self.indent
        if self.label is not None:
            head += f"{self.label:<{_LABEL}}"
        rest = " " * len(head)
        rows = textwrap.wrap(
            self.text,
            width=max(width, len(head) + 20),
            initial_indent=head,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return rows or [""]


@dataclass(frozen=True, kw_only=True)
class Story:
    """All that is known of a run's attempts. `observations` are by token, of open attempts."""

    run: str
    record: RunRecord | None
    folder: Path
    attempts: Mapping[Stage, tuple[Attempt, ...]]
    stages: Mapping[Stage, StageRecord] = field(default_factory=dict)
    refusals: Mapping[Stage, Refusal] = field(default_factory=dict)
    commits: frozenset[tuple[int, int]] = frozenset()
    observations: Mapping[str, JobObservation] = field(default_factory=dict)

    @property
    def open_attempts(self) -> tuple[Attempt, ...]:
        return tuple(one for found in self.attempts.values() for one in found if one.is_open)


def gather(ledger: Ledger, *, folder: Path) -> Story:
    """The run as the bucket shows it now; `folder` is where its logs are."""
    records = {stage: ledger.stage_records(stage) for stage in Stage}
    refusals = {stage: ledger.refusal(stage) for stage in Stage}
    return Story(
        run=ledger.keys.run,
        record=ledger.run_record(),
        folder=folder,
        attempts={stage: ledger.attempts(stage) for stage in Stage},
        stages={stage: found[-1] for stage, found in records.items() if found},
        refusals={stage: found for stage, found in refusals.items() if found is not None},
        commits=frozenset(commit_places(ledger)),
    )


def explain(
    story: Story,
    *,
    now: datetime,
    zone: tzinfo,
    stage: Stage | None = None,
    attempt: int | None = None,
) -> tuple[Line, ...]:
    """The run's last word, then attempt for attempt what happened and what followed.

    `stage` and `attempt` narrow it down; of one attempt all evidence is shown.
    """
    teller = _Teller(story=story, now=now, zone=zone)
    return tuple(teller.tell(stage, attempt))


_TONES: Mapping[Standing, Tone] = {
    Standing.FINISHED: Tone.GOOD,
    Standing.GAVE_UP: Tone.BAD,
    Standing.REFUSED: Tone.BAD,
    Standing.STOPPED: Tone.UNDECIDED,
    Standing.UNDER_WAY: Tone.UNDECIDED,
    Standing.BETWEEN: Tone.UNDECIDED,
}


@dataclass(frozen=True, kw_only=True)
class _Teller:
    story: Story
    now: datetime
    zone: tzinfo

    def tell(self, stage: Stage | None, number: int | None) -> Iterator[Line]:
        yield from self._headline()
        shown = [one for one in Stage if stage is None or one is stage]
        for one in shown:
            attempts = self.story.attempts.get(one, ())
            if attempts:
                yield from self._stage(one, attempts, number=number, is_asked=stage is not None)
        if not any(self.story.attempts.get(one) for one in shown):
            what = "the run" if stage is None else f"stage {stage}"
            yield Line(text="")
            yield Line(text=f"No attempt of {what} was made.", tone=Tone.FAINT)

    def _word(self, stage: Stage) -> LastWord:
        story = self.story
        return last_word(
            story.attempts.get(stage, ()),
            record=story.stages.get(stage),
            refusal=story.refusals.get(stage),
        )

    def _headline(self) -> Iterator[Line]:
        words = [(stage, self._word(stage)) for stage in Stage]
        begun = [(stage, word) for stage, word in words if word.standing is not Standing.NOT_BEGUN]
        if not begun:
            yield Line(text=f"Run {self.story.run}: nothing was begun.", tone=Tone.TITLE)
            return
        stage, word = begun[-1]
        tone = _TONES[word.standing]
        yield Line(text=f"Run {self.story.run}: {stage} {_standing(word)}.", tone=Tone.TITLE)
        yield Line(text=word.reason, tone=tone, indent=2, label="why")
        if (advice := _advice(word)) is not None:
            yield Line(text=advice, indent=2, label="to do")

    def _stage(
        self, stage: Stage, attempts: Sequence[Attempt], *, number: int | None, is_asked: bool
    ) -> Iterator[Line]:
        chosen = [one for one in attempts if number is None or one.number == number]
        done = [one for one in chosen if _is_done(one)]
        left_out = set()
        if not is_asked and number is None and len(done) > DONE_SHOWN:
            left_out = {one.number for one in done}
        word = self._word(stage)
        yield Line(text="")
        yield Line(text=f"{stage}: {_standing(word)}", tone=_TONES.get(word.standing, Tone.PLAIN))
        if left_out:
            told = f"{len(left_out)} attempts are done; --stage {stage} shows them"
            yield Line(text=told, tone=Tone.FAINT, indent=2)
        for one in chosen:
            if one.number not in left_out:
                yield from self._attempt(one, attempts, is_asked=number is not None)

    def _attempt(
        self, attempt: Attempt, attempts: Sequence[Attempt], *, is_asked: bool
    ) -> Iterator[Line]:
        yield Line(text="")
        yield Line(text=_title(attempt), tone=Tone.TITLE, indent=2)
        yield from self._times(attempt)
        if (steps := self._steps(attempt)) is not None:
            yield Line(text=steps, indent=4, label="steps")
        for index, reason in enumerate(attempt.resume.passed if attempt.resume is not None else ()):
            label = "" if index else "skipped"
            yield Line(text=reason, tone=Tone.UNDECIDED, indent=4, label=label)
        if attempt.end is None:
            yield from self._open(attempt)
            return
        if _is_done(attempt):
            yield Line(text="done", tone=Tone.GOOD, indent=4, label="end")
            return
        yield from self._end(attempt, is_asked=is_asked)
        yield from self._next(attempt, attempts)
        yield self._logs(attempt)

    def _times(self, attempt: Attempt) -> Iterator[Line]:
        start, job_id = attempt.start, _job_id(attempt)
        job = f"job {job_id}" if job_id is not None else "a job that nobody saw"
        made = attempt.intent.created_at
        if start is None or start.job is None:
            yield Line(text=f"{self._at(made)}, {job}", indent=4, label="made")
            return
        until = _until(attempt)
        lasted = "" if until is None else f" to {self._at(until, after=start.at)}"
        length = "" if until is None else f" ({_duration(until, start.at)})"
        where = f" on {_listed(attempt.nodes)}" if attempt.nodes else ""
        ran = f"{self._at(start.at)}{lasted}{length}, {job}{where}"
        yield Line(text=ran, indent=4, label="ran")
        if (start.at - made).total_seconds() >= 60:
            yield Line(text=f"{_duration(start.at, made)} before that", indent=4, label="queued")

    def _steps(self, attempt: Attempt) -> str | None:
        told = [beat.step for beat in attempt.heartbeats if beat.step is not None]
        kept = [step for step, number in self.story.commits if number == attempt.number]
        is_train = attempt.intent.stage is Stage.TRAIN
        counts_steps = is_train or attempt.intent.stage is Stage.SMOKE
        if not counts_steps or (not told and attempt.resume is None):
            return None
        words = []
        if attempt.resume is not None:
            source = attempt.resume.source
            words.append("from the beginning" if source is None else f"from step {source.step}")
        words.append(f"told up to step {max(told)}" if told else "none was told")
        if is_train and attempt.resume is not None:
            words.append(f"committed up to {max(kept)}" if kept else "nothing committed")
        return ", ".join(words)

    def _open(self, attempt: Attempt) -> Iterator[Line]:
        seen = self.story.observations.get(attempt.intent.token)
        waits = waits_for(attempt, seen, now=self.now)
        yield Line(text=waits, tone=Tone.UNDECIDED, indent=4, label="waits for")
        if attempt.cancel is not None:
            cancel = attempt.cancel
            yield Line(text=f"by {cancel.who}: {cancel.why}", indent=4, label="cancelled")
        yield self._logs(attempt)

    def _end(self, attempt: Attempt, *, is_asked: bool) -> Iterator[Line]:
        assert attempt.end is not None
        diagnosis = attempt.end.diagnosis
        is_stop = attempt.end.decision.action is Action.STOP
        first, *more = diagnosis.evidence or ("nothing more is known",)
        tone = Tone.UNDECIDED if is_stop else Tone.BAD
        yield Line(text=f"{diagnosis.kind}: {first}", tone=tone, indent=4, label="end")
        shown = more if is_asked else more[:EVIDENCE_LINES]
        for index, line in enumerate(shown):
            yield Line(text=line, indent=4, label="" if index else "evidence")
        if len(shown) < len(more):
            stage, number = attempt.intent.stage, attempt.number
            hint = f"and {len(more) - len(shown)} more: --stage {stage} --attempt {number}"
            yield Line(text=hint, tone=Tone.FAINT, indent=4, label="")
        if diagnosis.culprit_nodes:
            yield Line(text=_listed(diagnosis.culprit_nodes), indent=4, label="culprit")

    def _next(self, attempt: Attempt, attempts: Sequence[Attempt]) -> Iterator[Line]:
        assert attempt.end is not None
        decision = attempt.end.decision
        delay = f", after {decision.delay_s:.0f} s" if decision.delay_s else ""
        yield Line(text=f"{decision.action}{delay}: {decision.reason}", indent=4, label="decision")
        follower = next((one for one in attempts if one.intent.after == attempt.number), None)
        if follower is not None:
            made = self._at(follower.intent.created_at, after=attempt.end.at)
            again = " (asked for again)" if decision.action in FINAL else ""
            yield Line(text=f"{_title(follower)}, at {made}{again}", indent=4, label="next")
            return
        if decision.action in FINAL:
            return
        refusal = self.story.refusals.get(attempt.intent.stage)
        if refusal is not None and refusal.after == attempts[-1].number:
            yield Line(text=f"nothing: {refusal.reason}", tone=Tone.BAD, indent=4, label="next")
            return
        text = "no other attempt was made yet"
        if attempt.intent.most_nodes is not None and decision.exclude_nodes:
            text += "; it may wait for excluded nodes to come back (retry.wait_for_nodes_s)"
        yield Line(text=text, tone=Tone.UNDECIDED, indent=4, label="next")

    def _logs(self, attempt: Attempt) -> Line:
        path = self.story.folder / attempt.intent.stage / f"{attempt.number:04d}"
        return Line(text=str(path), tone=Tone.FAINT, indent=4, label="logs")

    def _at(self, moment: datetime, *, after: datetime | None = None) -> str:
        """The time where the reader is; the day is left out where it is the same as `after`'s."""
        local = moment.astimezone(self.zone)
        is_same_day = after is not None and after.astimezone(self.zone).date() == local.date()
        return f"{local:%H:%M:%S}" if is_same_day else f"{local:%Y-%m-%d %H:%M:%S}"


def _standing(word: LastWord) -> str:
    match word.standing:
        case Standing.UNDER_WAY:
            return "is under way"
        case Standing.BETWEEN:
            return "is between two attempts"
        case Standing.FINISHED:
            return "is finished"
        case Standing.REFUSED:
            return "refused"
        case Standing.STOPPED:
            return "was stopped"
        case _:
            return word.standing.value


def _advice(word: LastWord) -> str | None:
    if word.standing in {Standing.UNDER_WAY, Standing.BETWEEN}:
        return "nothing while an engine lives; else the same command carries on from here"
    if word.standing in {Standing.GAVE_UP, Standing.REFUSED}:
        return "mend it, then give the same command again: it carries on from here"
    if word.standing is Standing.STOPPED:
        return "the same command carries on from here"
    return None


def _title(attempt: Attempt) -> str:
    intent = attempt.intent
    parts = [f"attempt {intent.attempt}"]
    if intent.unit != intent.stage.value:
        parts.append(intent.unit)
    source = attempt.resume.source if attempt.resume is not None else intent.floor
    if source is not None:
        parts.append(f"from step {source.step}")
    if intent.ceiling is not None:
        parts.append(f"nothing newer than step {intent.ceiling}")
    if attempt.is_array:
        parts.append(f"{intent.elements} elements")
    if intent.excluded:
        parts.append(f"without {_listed(intent.excluded)}")
    return " · ".join(parts)


def _is_done(attempt: Attempt) -> bool:
    return attempt.end is not None and attempt.end.diagnosis.kind is Kind.DONE


def _job_id(attempt: Attempt) -> str | None:
    if attempt.start is not None and attempt.start.job is not None:
        return attempt.start.job.job_id
    return attempt.submitted.job_id if attempt.submitted is not None else None


def _until(attempt: Attempt) -> datetime | None:
    """When it was over: as it said itself, else when it last lived, else when it was closed."""
    if attempt.exit is not None:
        return attempt.exit.at
    if attempt.end is None:
        return None
    return max((beat.at for beat in attempt.heartbeats), default=attempt.end.at)


def _listed(names: Sequence[str], *, shown: int = 8) -> str:
    more = len(names) - shown
    told = ", ".join(names[:shown])
    return f"{told} and {more} more" if more > 0 else told


def _duration(until: datetime, since: datetime) -> str:
    return spell_duration(max(0.0, (until - since).total_seconds()))
