"""One Prefect server for all tests that need one: it takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server in which flows called by the tests are seen."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    # Each flow would wait a second at its end for the thread of its heartbeat.
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield
