"""`headrace down` ends the servers of a spec, and says of each whether there was one to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.loading import load_spec
from storage import embedded


@pytest.mark.s3
def test_what_was_running_is_told_apart_from_what_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"run: a\nworkdir: {tmp_path}/work\ndata: {{inputs: [x]}}\n")
    loaded = load_spec(spec)
    store = embedded.store_of(loaded.store, workdir=loaded.workdir)
    assert store is not None
    store.ensure()
    try:
        told = CliRunner().invoke(app, ["down", str(spec)])
        assert told.exit_code == 0, told.output
        assert "No Prefect server was running." in told.output
        assert f"The embedded store is down; its data stays in {store.directory}." in told.output
        assert not store.status().running
        again = CliRunner().invoke(app, ["down", str(spec)])
        assert f"No embedded store was running in {store.directory}" in again.output
    finally:
        store.stop()
