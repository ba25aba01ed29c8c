"""What a spec may change under the name of a run that has begun, and what needs a run of its own.

A table: a run goes on with other nodes, limits and intervals, but never with another model, other
data or another batch, as its result would then be that of no spec at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from flows.spec import PipelineSpec
from storage.errors import SpecError


@dataclass(frozen=True)
class Rule:
    """One row: `field` is a path in the spec, `block.*` all that is below the block.

    `alters` is for what may change and gives other numbers from there on, which is told apart.
    """

    field: str
    may: bool
    why: str
    alters: bool = False


def _may(field: str, why: str) -> Rule:
    return Rule(field, may=True, why=why)


def _alters(field: str, why: str) -> Rule:
    return Rule(field, may=True, why=why, alters=True)


def _fork(field: str, why: str) -> Rule:
    return Rule(field, may=False, why=why)


_WHERE_RECORDS_ARE = "the run is where its records are found"
_HOW_IT_IS_REACHED = "only how the store is reached"

TABLE: tuple[Rule, ...] = (
    _fork("run", "the name is the run"),
    _may("workdir", "new logs go there, the old ones stay"),
    _may("cluster.*", "where and how jobs run; the training takes any number of nodes"),
    _may("store.bucket", _WHERE_RECORDS_ARE),
    _may("store.prefix", _WHERE_RECORDS_ARE),
    _may("store.endpoint_url", _WHERE_RECORDS_ARE),
    _may("store.aws", _WHERE_RECORDS_ARE),
    _may("store.embedded.*", _WHERE_RECORDS_ARE),
    _may("store.region", _HOW_IT_IS_REACHED),
    _may("store.addressing_style", _HOW_IT_IS_REACHED),
    _may("store.checksums", _HOW_IT_IS_REACHED),
    _may("store.credentials_file", _HOW_IT_IS_REACHED),
    _may("store.profile", _HOW_IT_IS_REACHED),
    _may("store.claims", "the run makes its claims where it did at first"),
    _may("store.connect_timeout_s", _HOW_IT_IS_REACHED),
    _may("store.read_timeout_s", _HOW_IT_IS_REACHED),
    _may("store.max_attempts", _HOW_IT_IS_REACHED),
    _may("validation.*", "which nodes are fit is found anew"),
    _may("data.jobs", "how many jobs make the data set, which is the same"),
    _fork("data", "a run has one trainer, which learns from one data set"),
    _fork("data.*", "it makes another data set; a corpus that was moved needs a link in its place"),
    _may("smoke.*", "a measurement, which leaves nothing in the model"),
    _fork("train.model.*", "the checkpoints are of the model as it was"),
    _alters("train.steps", "the schedule is stretched or shortened with it"),
    _fork("train.sequence", "the samples so far were cut to it"),
    _fork("train.global_batch", "the samples so far were taken by it"),
    _may("train.micro_batch", "the same sums in other portions, alike but for rounding"),
    _fork("train.param_dtype", "the steps so far were computed in it"),
    _fork("train.seed", "it orders the samples"),
    _alters("train.schedule.*", "the learning rate follows it"),
    _alters("train.optimizer.*", "the optimizer follows it"),
    _may("train.checkpoint.*", "when checkpoints are saved"),
    _may("train.validate_every_steps", "an interval"),
    _may("train.validate_batches", "later losses are measured on another part of the held-out set"),
    _may("train.log_every_steps", "an interval"),
    _may("train.start_timeout_s", "patience"),
    _may("train.step_timeout_s", "patience"),
    _may("train.watchdog.*", "patience"),
    _may("train.threads", "speed"),
    _fork("command", "a run has one trainer"),
    _alters("command.argv", "what the script makes of it, it alone knows"),
    _may("command.per", "how the script is started"),
    _may("command.cwd", "where the script is started"),
    _fork("command.checkpoints", "the script would not find the checkpoints it has"),
    _may("command.stop_signal", "how the script is told to leave"),
    _may("command.progress", "how its output is read"),
    _may("command.steps", "the last step that is shown"),
    _may("command.hang_after_s", "patience"),
    _may("command.start_timeout_s", "patience"),
    _may("retention.*", "what is kept from now on"),
    _may("retry.*", "what is tried again from now on"),
    _may("logs.*", "what is kept from now on"),
)

_BY_FIELD: Mapping[str, Rule] = {rule.field: rule for rule in TABLE}


def rule_of(field: str) -> Rule | None:
    """The row of a field: its own, else that of the nearest block that has one for all in it."""
    if field in _BY_FIELD:
        return _BY_FIELD[field]
    block = field
    while "." in block:
        block = block.rpartition(".")[0]
        if f"{block}.*" in _BY_FIELD:
            return _BY_FIELD[f"{block}.*"]
    return None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A field that is not as it was when the run began."""

    field: str
    old: Any
    new: Any
    rule: Rule

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.old)} -> {_shown(self.new)} ({self.rule.why})"


def changes(old: Mapping[str, Any], spec: PipelineSpec) -> tuple[Change, ...]:
    """What is not as it was. `old` is a spec as any version of Headrace recorded it.

    A field that it does not know has its default of now; one that is no more is passed over.
    """
    before, after = _settled(old), _settled(spec.model_dump(mode="json"))
    return tuple(_changes(PipelineSpec, before, after, path=""))


def require_same_run(run: str, found: Sequence[Change]) -> None:
    """Refuses a spec that would make another run of this one.

    Raises:
        SpecError: it names each field, both values, and the two ways out.
    """
    forbidden = [change for change in found if not change.rule.may]
    if forbidden:
        raise SpecError(
            f"run {run!r} was begun with another spec, and this must not change in mid-run:\n"
            + "".join(f"  {change}\n" for change in forbidden)
            + "set it back, or begin a run of its own from this spec: `headrace run SPEC --fork "
            "NEW`, or, in the parameters of a deployment, another name for `run`"
        )


def told(found: Sequence[Change], *, step: int | None) -> tuple[str, ...]:
    """A line for each change that is carried out. `step` is the newest that is committed."""
    since = "the first step" if step is None else f"step {step}"
    return tuple(
        f"changed since the run began: {change}"
        + (f"; it ALTERS the training, from {since} on" if change.rule.alters else "")
        for change in found
        if change.rule.may
    )


def _changes(
    model: type[BaseModel], old: Mapping[str, Any], new: Mapping[str, Any], *, path: str
) -> Iterator[Change]:
    for name, field in model.model_fields.items():
        place = f"{path}{name}"
        default = field.get_default(call_default_factory=True)
        default = None if default is PydanticUndefined else to_jsonable_python(default)
        was, is_now = old.get(name, default), new[name]
        block = block_of(field.annotation)
        if block is not None and isinstance(was, Mapping) and isinstance(is_now, Mapping):
            yield from _changes(block, was, is_now, path=f"{place}.")
        elif was != is_now:
            rule = rule_of(place)
            assert rule is not None, f"no rule for {place}"
            yield Change(field=place, old=was, new=is_now, rule=rule)


def block_of(annotation: Any) -> type[BaseModel] | None:
    """The block that a field holds, where it holds one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _settled(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec without what anchoring adds to it, and with the folder that a default stands for."""
    settled = dict(spec)
    workdir = str(spec.get("workdir"))
    if isinstance(data := spec.get("data"), Mapping):
        store = spec.get("store") or {}
        own = {workdir, str((store.get("embedded") or {}).get("directory"))}
        exclude = [item for item in data.get("exclude", ()) if item not in own]
        settled["data"] = {**data, "exclude": exclude}
    if isinstance(command := spec.get("command"), Mapping):
        default = f"{workdir}/{spec.get('run')}/checkpoints"
        settled["command"] = {**command, "checkpoints": command.get("checkpoints") or default}
    return settled


def _shown(value: Any) -> str:
    """The value as YAML would have it, on a line."""
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
