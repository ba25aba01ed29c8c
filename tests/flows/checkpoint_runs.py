"""Runs with real checkpoints in a real store, and the command line that looks at them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from flows.cli.app import app
from flows.loading import load_spec
from storage.checkpoint_records import Commit, CommitRef, Resume
from storage.embedded import EmbeddedStore, resolved
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.records import Action, Decision, Diagnosis, End, Intent, Kind, RunRecord, new_nonce
from storage.spec import StoreSpec
from tests.storage.checkpoints.work import (
    make_context,
    make_intent,
    make_state,
    open_store,
    save_state,
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a test's own."""

    name: str
    file: Path
    store: StoreSpec
    ledger: Ledger

    def begin(self, spec: dict[str, Any] | None = None) -> None:
        self.ledger.claim_run(
            RunRecord(
                run=self.name,
                spec=spec or {},
                code="c",
                git_commit=None,
                git_dirty=None,
                store_probe={},
                nonce=new_nonce(),
                at=datetime.now(UTC),
            )
        )

    def attempt(self, number: int = 1, *, source: CommitRef | None = None) -> Intent:
        """An attempt that has resumed, from `source` where there is one."""
        intent = self.claim(number)
        resume = Resume(source=source, world_size=1, nonce=new_nonce(), at=datetime.now(UTC))
        assert self.ledger.claim_resume(intent, resume).won
        return intent

    def claim(self, number: int) -> Intent:
        intent = replace(make_intent(number), run=self.name)
        self.ledger.claim_intent(intent)
        return intent

    def end(
        self, intent: Intent, kind: Kind = Kind.HARDWARE, action: Action = Action.RESUME
    ) -> None:
        end = End(
            diagnosis=Diagnosis(kind=kind),
            decision=Decision(action=action, reason="a test says so"),
            by="test",
            nonce=new_nonce(),
            at=datetime.now(UTC),
        )
        assert self.ledger.claim_end(intent, end).won

    def save(self, intent: Intent, step: int, state: dict[str, Any] | None = None) -> Commit:
        context = make_context(self.store, intent)
        return save_state(context, state or make_state(seed=float(step)), step=step)

    def ask(self, command: str, *words: str) -> Result:
        """What the command line answers; what it raises is raised."""
        return CliRunner().invoke(
            app,
            ["checkpoints", command, self.name, *words, "--spec", str(self.file)],
            catch_exceptions=False,
        )

    def failed(self, command: str, *words: str) -> tuple[str, BaseException]:
        """What the command line says before it raises, and what it raises."""
        words = ("checkpoints", command, self.name, *words, "--spec", str(self.file))
        answer = CliRunner().invoke(app, words)
        assert answer.exception is not None
        return answer.stdout, answer.exception

    def told(self, command: str, *words: str) -> str:
        answer = self.ask(command, *words)
        assert answer.exit_code == 0, answer.output
        return answer.stdout


@dataclass(frozen=True)
class Site:
    """A store with room for many runs, and the file that names it."""

    file: Path
    store: StoreSpec

    def run(self, *, begun: bool = True) -> Run:
        name = f"t{secrets.token_hex(4)}"
        ledger = Ledger(open_store(self.store), RunKeys(prefix=self.store.prefix, run=name))
        run = Run(name=name, file=self.file, store=self.store, ledger=ledger)
        if begun:
            run.begin()
        return run


@contextmanager
def a_site(folder: Path) -> Iterator[Site]:
    server = EmbeddedStore(directory=folder / "store", host="127.0.0.1", bucket="headrace")
    store = resolved(StoreSpec(), server.ensure())
    path = folder / "any.yaml"
    fields = {
        "run": "any",
        "workdir": str(folder / "work"),
        "data": {"inputs": [f"{folder}/*.txt"]},
        "store": store.model_dump(mode="json", exclude={"embedded"}),
        "retention": {"grace_s": 0},
    }
    path.write_text(yaml.safe_dump(fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(folder / "home"))
        # One client for all commands: making one takes longer than what most of them do.
        patch.setattr("flows.opening.ObjectStore", open_store)
        try:
            yield Site(path, load_spec(path).store)
        finally:
            server.stop()
