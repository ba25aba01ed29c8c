"""How a stage ends without its result, as its callers and a person see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.attempts import Attempt
from storage.errors import DataError, HeadraceError, SlurmError, SpecError, StageFailed
from storage.records import Refusal, Stage
from tasks.context import RunContext
from tasks.engine import Engine


class AttemptFailed(StageFailed):
    """A unit of a stage has no result. `attempt` decided it; None where none could be made."""

    def __init__(
        self, *, stage: Stage, unit: str, reason: str, attempt: Attempt | None, folder: Path | None
    ) -> None:
        self.stage = stage
        self.unit = unit
        self.attempt = attempt
        self.folder = folder
        told = f"{stage}: unit {unit} failed: {reason}"
        if attempt is not None and attempt.end is not None:
            told += f"\nattempt {attempt.number} ended as {attempt.end.diagnosis.message}"
        if folder is not None:
            told += f"\nits logs are in {folder}"
        super().__init__(told)


class RunCancelled(HeadraceError):
    """A person ended the run: no failure, and nothing to retry until it is asked for again."""


@contextmanager
def leaving_word(context: RunContext, stage: Stage) -> Iterator[None]:
    """Keeps why a stage ended where no attempt can tell, as none was made or all of them are over.

    Raises:
        SpecError, SlurmError, DataError: it ended so.
    """
    try:
        yield
    except (SpecError, SlurmError, DataError) as error:
        engine = context.engine or Engine()
        attempts = context.ledger.attempts(stage)
        refusal = Refusal(
            stage=stage,
            unit=stage.value,
            reason=str(error),
            after=attempts[-1].number if attempts else None,
            by=engine.name,
            at=engine.clock.now(),
        )
        context.ledger.put_refusal(refusal)
        raise
