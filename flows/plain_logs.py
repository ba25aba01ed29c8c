"""Prefect's log without tracebacks that tell nothing: of a state that says itself why it is red."""

from __future__ import annotations

import logging

from prefect.exceptions import CancelledRun, CrashedRun, FailedRun

LOGGERS = ("prefect.task_runs", "prefect.flow_runs", "prefect.engine")
_STATES = (CancelledRun, CrashedRun, FailedRun)


class NoEmptyTracebacks(logging.Filter):
    """Keeps the message, and the traceback where there was an error of the program."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        if kind is None or issubclass(kind, _STATES):
            record.exc_info = None
        return True


_FILTER = NoEmptyTracebacks()


def keep_logs_plain() -> None:
    """For all flows of this process; to be called as often as one likes."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)
