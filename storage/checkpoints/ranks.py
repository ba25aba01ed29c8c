"""How the ranks of a job agree: one of them decides, or all of them must be well.

An exception on one rank must not leave the others waiting in a collective. So work that precedes a
collective runs inside it: whatever one rank raises, every rank raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from storage.errors import CheckpointError, HeadraceError, LedgerError, StoreError
from storage.job import JobExit
from storage.records import ExitCode

T = TypeVar("T")

_KINDS: dict[str, type[HeadraceError]] = {
    kind.__name__: kind for kind in (CheckpointError, LedgerError, StoreError)
}


@dataclass(frozen=True)
class _Failure:
    """An exception in a form that survives the way to another process."""

    rank: int
    kind: str
    code: ExitCode | None
    text: str

    @classmethod
    def of(cls, error: Exception, *, rank: int) -> _Failure:
        kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS), "")
        told = (
            str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
        )
        return cls(
            rank=rank,
            kind=kind,
            code=error.code if isinstance(error, JobExit) else None,
            text=told,
        )

    def exception(self) -> HeadraceError:
        text = f"rank {self.rank}: {self.text}"
        if self.code is not None:
            return JobExit(self.code, text)
        return _KINDS.get(self.kind, CheckpointError)(text)


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """What became of a piece of work: a value, or a failure."""

    value: T | None = None
    failure: _Failure | None = None


class Ranks:
    """The ranks of the default process group, or this process alone where there is none.

    Every method is collective.
    """

    def __init__(self) -> None:
        self._alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._alone else dist.get_rank()
        self.world_size = 1 if self._alone else dist.get_world_size()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, produce: Callable[[], T]) -> T:
        """What `produce` returned on rank 0; it is called nowhere else."""
        outcome, raised = self._try(produce) if self.is_first else (None, None)
        return self._broadcast(outcome, raised)

    def from_late_first(self, produce: Callable[[], T], *, name: str, timeout_s: float) -> T:
        """As `from_first`, for work that may take longer than the process group's time-out.

        A collective that times out breaks the group for good, so the others wait beside it, on the
        store of the rendezvous, under a `name` that is used once.
        """
        outcome, raised = self._try(produce) if self.is_first else (None, None)
        if not self._alone:
            beside = _get_default_store()
            if self.is_first:
                beside.set(name, "ready")
            else:
                try:
                    beside.wait([name], timedelta(seconds=timeout_s))
                except RuntimeError as error:
                    raise CheckpointError(
                        f"rank 0 did not say within {timeout_s:g} s what became of {name}: {error}"
                    ) from error
        return self._broadcast(outcome, raised)

    def from_late_all(
        self, produce: Callable[[], T], *, name: str, timeout_s: float
    ) -> tuple[T, ...]:
        """As `from_all`, for work that may take longer than the process group's time-out.

        Each waits for the last one beside the collectives, under a `name` that is used once.
        """
        outcome, raised = self._try(produce)
        if not self._alone:
            beside = _get_default_store()
            if beside.add(name, 1) == self.world_size:
                beside.set(f"{name}/all", "ready")
            try:
                beside.wait([f"{name}/all"], timedelta(seconds=timeout_s))
            except RuntimeError as error:
                if raised is not None:
                    raise raised from None
                raise CheckpointError(
                    f"not all ranks came to {name} within {timeout_s:g} s: {error}"
                ) from error

        def told() -> T:
            return _value(outcome, raised)

        return self.from_all(told)

    def from_all(self, produce: Callable[[], T]) -> tuple[T, ...]:
        """What `produce` returned on each rank, in the order of the ranks."""
        outcome, raised = self._try(produce)
        outcomes: list[Any] = [outcome]
        if not self._alone:
            outcomes = [None] * self.world_size
            dist.all_gather_object(outcomes, outcome)
        if raised is not None:
            raise raised
        return tuple(_value(each, None) for each in outcomes)

    def through_first(
        self, produce: Callable[[], T], arrange: Callable[[list[T]], Sequence[T]]
    ) -> T:
        """This rank's share of what rank 0 arranged from what all ranks produced."""
        outcome, raised = self._try(produce)
        outcomes: list[Any] = [outcome]
        if not self._alone:
            outcomes = [None] * self.world_size
            dist.gather_object(outcome, outcomes if self.is_first else None, dst=0)

        def arranged() -> Sequence[T]:
            return arrange([_value(each, None) for each in outcomes])

        shares: list[Any] = [None] * self.world_size
        if self.is_first:
            whole, own = self._try(arranged)
            raised = raised or own
            shares = [_Outcome(value=share) for share in whole.value or ()] or [
                whole
            ] * self.world_size
        share = [shares[0]]
        if not self._alone:
            dist.scatter_object_list(share, shares if self.is_first else None, src=0)
        scattered: _Outcome[T] = share[0]
        return _value(scattered, raised)

    def _broadcast(self, outcome: _Outcome[T] | None, raised: Exception | None) -> T:
        box = [outcome]
        if not self._alone:
            try:
                dist.broadcast_object_list(box, src=0)
            except RuntimeError:
                # The group may be broken by what `raised` tells of: that is the one to hear.
                if raised is not None:
                    raise raised from None
                raise
        assert box[0] is not None
        return _value(box[0], raised)

    def _try(self, produce: Callable[[], T]) -> tuple[_Outcome[T], Exception | None]:
        try:
            return _Outcome(value=produce()), None
        except Exception as error:
            return _Outcome(failure=_Failure.of(error, rank=self.rank)), error


def _value(outcome: _Outcome[T], raised: Exception | None) -> T:
    """The value, or the exception: this rank's own where it has one, for the traceback's sake."""
    if raised is not None:
        raise raised
    if outcome.failure is not None:
        raise outcome.failure.exception()
    return cast("T", outcome.value)
