"""The one exception tree, so that a caller can catch what Headrace says and nothing else.

::

    HeadraceError
    ├── SpecError              the user's file is wrong (exit code 2)
    ├── StoreError             the object store refused, failed or timed out
    │   └── ObjectMissing      a key that had to be there is not
    ├── LedgerError            records contradict each other
    ├── CheckpointError        commits exist but none is valid, or one does not fit the model
    ├── DataError              input documents cannot be read, past the spec's limit
    ├── SlurmError             a Slurm command failed or cannot be understood
    │   └── SubmitRejected     sbatch said no: nothing was queued
    └── StageFailed            a stage ended without its result

Packages add leaves of their own below these, never a second root.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose; its text is fit for a user."""


class SpecError(HeadraceError):
    """The spec, or an argument, is wrong: the text names field, value, bound and remedy."""


class StoreError(HeadraceError):
    """The object store refused, failed or stayed silent past its deadline."""


class ObjectMissing(StoreError):
    """A key that had to exist does not."""

    def __init__(self, key: str) -> None:
        super().__init__(f"no object at {key!r}")
        self.key = key


class LedgerError(HeadraceError):
    """Records of the ledger contradict each other."""


class CheckpointError(HeadraceError):
    """Commits exist but none is valid, or a checkpoint does not fit the model."""


class DataError(HeadraceError):
    """Input documents cannot be read, past the limit that the spec sets."""


class SlurmError(HeadraceError):
    """A Slurm command failed, timed out, or said something that cannot be understood."""


class SubmitRejected(SlurmError):
    """sbatch refused the job explicitly, so nothing was queued."""


class StageFailed(HeadraceError):
    """A stage ended without its result; the text says which gate or attempt decided it."""
