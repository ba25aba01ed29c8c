"""The attempts ledger: what was tried, by whom, and how it ended.

Everything that must have one winner is created conditionally, and whoever loses acts on what is
read back. Attempts are found by numbered GETs, never by a listing alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from storage.attempts import Attempt, Element
from storage.checkpoint_records import Resume
from storage.errors import LedgerError
from storage.keys import RECORD_SUFFIX, RunKeys
from storage.object_store import ObjectInfo, ObjectStore
from storage.records import (
    Cancel,
    End,
    Exit,
    Heartbeat,
    Intent,
    Refusal,
    RunRecord,
    Stage,
    StageRecord,
    Start,
    Submitted,
    decode,
    encode,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Claim(Generic[T]):
    """The outcome of a conditional create: `record` is what stands now, ours or not."""

    won: bool
    record: T


class Ledger:
    """The records of one run."""

    def __init__(self, store: ObjectStore, keys: RunKeys) -> None:
        self.store = store
        self.keys = keys

    def run_record(self) -> RunRecord | None:
        return self._get(RunRecord, self.keys.run_record)

    def claim_run(self, record: RunRecord) -> Claim[RunRecord]:
        return self._claim(self.keys.run_record, record)

    def claim_intent(self, intent: Intent) -> Claim[Intent]:
        return self._claim(self.keys.intent(intent.stage, intent.attempt), intent)

    def claim_submitted(self, intent: Intent, record: Submitted) -> Claim[Submitted]:
        return self._claim_beside(intent, "submitted", record)

    def claim_start(self, intent: Intent, record: Start) -> Claim[Start]:
        return self._claim_beside(intent, "start", record)

    def claim_resume(self, intent: Intent, record: Resume) -> Claim[Resume]:
        return self._claim_beside(intent, "resume", record)

    def claim_cancel(self, intent: Intent, record: Cancel) -> Claim[Cancel]:
        return self._claim_beside(intent, "cancel", record)

    def claim_exit(self, intent: Intent, record: Exit) -> Claim[Exit]:
        return self._claim_beside(intent, "exit", record)

    def claim_element_start(self, intent: Intent, element: int, record: Start) -> Claim[Start]:
        return self._claim_of_element(intent, element, "start", record)

    def claim_word(self, intent: Intent, record: Exit) -> Claim[Exit]:
        """The last word of whoever says it: an element of an array speaks of its own part."""
        if record.element is None:
            return self.claim_exit(intent, record)
        return self._claim_of_element(intent, record.element, "exit", record)

    def claim_end(self, intent: Intent, record: End) -> Claim[End]:
        return self._claim_beside(intent, "end", record)

    def intent(self, stage: Stage, number: int) -> Intent | None:
        return self._get(Intent, self.keys.intent(stage, number))

    def attempt(self, stage: Stage, number: int) -> Attempt | None:
        """One attempt with the records beside it, or None where no intent has that number."""
        intent = self.intent(stage, number)
        return None if intent is None else self.refreshed(Attempt(intent=intent))

    def refreshed(self, attempt: Attempt) -> Attempt:
        """The attempt with what has come since: records never change, so only the missing are read.

        The end is read first. So whatever a closed attempt shows was there when it was closed, or
        came later; none of it is missing because of the order of the reads.
        """
        intent = attempt.intent

        def beside(known: T | None, kind: type[T], name: str) -> T | None:
            return known if known is not None else self._beside(intent, kind, name)

        return replace(
            attempt,
            end=beside(attempt.end, End, "end"),
            exit=beside(attempt.exit, Exit, "exit"),
            cancel=beside(attempt.cancel, Cancel, "cancel"),
            resume=beside(attempt.resume, Resume, "resume"),
            start=beside(attempt.start, Start, "start"),
            submitted=beside(attempt.submitted, Submitted, "submitted"),
            heartbeats=self.heartbeats(intent.stage, intent.attempt),
            elements=self._elements(attempt) if attempt.is_array else (),
        )

    def ask_for_the_end(self, record: Cancel) -> None:
        """Tell every engine that carries the run out now, though it may have no open attempt."""
        self._claim(f"{self.keys.cancels}{record.nonce}.json", record)

    def cancel_keys(self) -> frozenset[str]:
        """Of all such wishes so far."""
        return frozenset(info.key for info in self._listed(self.keys.cancels))

    def asked_for_the_end(self, *, before: frozenset[str]) -> Cancel | None:
        """A wish that was not there `before`."""
        new = sorted(self.cancel_keys() - before)
        return self._get(Cancel, new[0]) if new else None

    def has_news(self, attempt: Attempt) -> bool:
        """Whether an attempt has left, or was told to, since it was read: two cheap questions."""
        known = {"exit": attempt.exit, "cancel": attempt.cancel}
        keys = (
            self.keys.attempt_record(attempt.intent.stage, attempt.number, name)
            for name, record in known.items()
            if record is None
        )
        return any(self.store.head(key) is not None for key in keys)

    def ends(self, stage: Stage) -> Iterator[Attempt]:
        """The closed attempts of a stage, each with its intent and end alone."""
        for intent in self._intents(stage):
            end = self._beside(intent, End, "end")
            if end is not None:
                yield Attempt(intent=intent, end=end)

    def attempts(self, stage: Stage) -> tuple[Attempt, ...]:
        """All attempts of a stage, in the order of their numbers."""
        return tuple(self.refreshed(Attempt(intent=intent)) for intent in self._intents(stage))

    def outlines(self, stage: Stage) -> tuple[Attempt, ...]:
        """The same, each with what decides which checkpoints count: intent, end and resume alone.

        A third of the questions, and every job that resumes has to wait for the answers. The end is
        read first, as in `refreshed`.
        """
        return tuple(
            Attempt(
                intent=intent,
                end=self._beside(intent, End, "end"),
                resume=self._beside(intent, Resume, "resume"),
            )
            for intent in self._intents(stage)
        )

    def _intents(self, stage: Stage) -> Iterator[Intent]:
        number = 1
        while (intent := self.intent(stage, number)) is not None:
            yield intent
            number += 1

    def _elements(self, attempt: Attempt) -> tuple[Element, ...]:
        """The elements that have come so far, with what is not known of them yet."""
        stage, number = attempt.intent.stage, attempt.number
        prefix = self.keys.elements(stage, number)
        found = {one.number: one for one in attempt.elements}
        for info in self._listed(prefix):
            name, _, kind = info.key.removeprefix(prefix).removesuffix(RECORD_SUFFIX).partition(".")
            one = found.get(int(name), Element(number=int(name)))
            if kind == "start" and one.start is None:
                one = replace(one, start=self._get(Start, info.key))
            elif kind == "exit" and one.exit is None:
                one = replace(one, exit=self._get(Exit, info.key))
            found[one.number] = one
        return tuple(found[element] for element in sorted(found))

    def heartbeats(self, stage: Stage, number: int) -> tuple[Heartbeat, ...]:
        prefix = self.keys.heartbeats(stage, number)
        return tuple(beat for _, beat in self.records(Heartbeat, prefix))

    def is_superseded(self, intent: Intent) -> bool:
        """Whether the attempt was closed, or a later one was made for the same unit."""
        end = self.keys.attempt_record(intent.stage, intent.attempt, "end")
        if self.store.head(end) is not None:
            return True
        number = intent.attempt + 1
        while True:
            later = self._get(Intent, self.keys.intent(intent.stage, number))
            if later is None:
                return False
            if later.unit == intent.unit:
                return True
            number += 1

    def stage_records(self, stage: Stage) -> tuple[StageRecord, ...]:
        """Completion records of a stage, oldest first."""
        found = self.records(StageRecord, self.keys.stage_records(stage))
        return tuple(sorted((record for _, record in found), key=lambda record: record.at))

    def refusal(self, stage: Stage) -> Refusal | None:
        return self._get(Refusal, self.keys.refusal(stage))

    def put_refusal(self, record: Refusal) -> None:
        """Say why a stage gave up. Nothing is decided by it, so the last writer may win."""
        self.store.put(self.keys.refusal(record.stage), encode(record))

    def claim_stage(self, record: StageRecord) -> Claim[StageRecord]:
        key = self.keys.stage_record(
            record.stage, fingerprint=record.fingerprint, generation=record.generation
        )
        return self._claim(key, record)

    def records(self, kind: type[T], prefix: str) -> Iterator[tuple[ObjectInfo, T]]:
        """Every record below `prefix`, with what the listing says of its object.

        What is not named like a record, such as the empty object that makes a console show a
        folder, is none of ours.

        Raises:
            LedgerError: an object that is named like one is none.
        """
        for info in self._listed(prefix):
            record = self._get(kind, info.key)
            if record is not None:
                yield info, record

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in self.store.list(prefix) if info.key.endswith(RECORD_SUFFIX))

    def _beside(self, intent: Intent, kind: type[T], name: str) -> T | None:
        return self._get(kind, self.keys.attempt_record(intent.stage, intent.attempt, name))

    def _claim_beside(self, intent: Intent, name: str, record: T) -> Claim[T]:
        return self._claim(self.keys.attempt_record(intent.stage, intent.attempt, name), record)

    def _claim_of_element(self, intent: Intent, element: int, name: str, record: T) -> Claim[T]:
        key = self.keys.element_record(intent.stage, intent.attempt, element, name)
        return self._claim(key, record)

    def _claim(self, key: str, record: T) -> Claim[T]:
        created = self.store.create(key, encode(record))
        return Claim(won=created.won, record=decode(type(record), created.body))

    def _get(self, kind: type[T], key: str) -> T | None:
        body = self.store.get_if_exists(key)
        if body is None:
            return None
        try:
            return decode(kind, body)
        except LedgerError as fault:
            raise LedgerError(
                f"the object at {key!r} is {fault}; remove it if it was put there by hand, restore "
                "it if it was changed"
            ) from None
