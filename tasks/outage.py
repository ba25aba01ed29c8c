"""A service that does not answer now: said once, waited for, and said again when it is back."""

from __future__ import annotations

from collections.abc import Callable

from storage.errors import HeadraceError

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0


class Outage:
    """An outage says nothing about the jobs, so it fails nothing; it is only ever waited for.

    With `bound_s` it is an error after all when it has lasted that long: a service that refuses for
    good, for lack of credentials say, looks no different from one that is down.
    """

    def __init__(
        self, service: str, *, say: Callable[[str], None], bound_s: float | None = None
    ) -> None:
        self._service = service
        self._say = say
        self._bound_s = bound_s
        self._since_s: float | None = None
        self._failures = 0

    def happened(self, error: HeadraceError, *, at_s: float) -> float:
        """Returns the seconds to wait before the next try. Raises the error past the bound."""
        if self._since_s is None:
            self._since_s = at_s
            self._say(f"{self._service} does not answer, waiting for it: {error}")
        if self._bound_s is not None and at_s - self._since_s > self._bound_s:
            raise error
        self._failures += 1
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._failures - 1))

    def is_over(self, *, at_s: float) -> None:
        """To be called at every answer."""
        if self._since_s is not None:
            self._say(f"{self._service} answers again, after {at_s - self._since_s:.0f} s")
        self._since_s, self._failures = None, 0
