"""A run goes on with other nodes and intervals, and never as another run under the same name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flows.changes import TABLE, block_of, changes, require_same_run, rule_of, told
from flows.spec import PipelineSpec
from storage.errors import SpecError

DATA = {"inputs": ["docs/*.txt"]}


def a_spec(**blocks: Any) -> PipelineSpec:
    blocks = {"run": "r", "data": DATA} | blocks
    return PipelineSpec.model_validate(blocks)


def recorded(spec: PipelineSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json")


def changed(old: PipelineSpec, new: PipelineSpec) -> list[str]:
    return [change.field for change in changes(recorded(old), new)]


def fields_of(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        block = block_of(field.annotation)
        if block is not None:
            yield from fields_of(block, f"{path}{name}.")
        if block is None or type(None) in getattr(field.annotation, "__args__", ()):
            yield f"{path}{name}"


FIELDS = tuple(fields_of(PipelineSpec))


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_the_spec_has_a_row(field: str) -> None:
    rule = rule_of(field)
    assert rule is not None, f"say in flows/changes.py whether {field} may change in mid-run"
    assert rule.why


def test_no_row_is_for_a_field_that_is_no_more_or_comes_twice() -> None:
    named = [rule.field for rule in TABLE]
    assert len(named) == len(set(named))
    for name in named:
        block = name.removesuffix("*")
        assert name in FIELDS or any(field.startswith(block) for field in FIELDS), name


@pytest.mark.parametrize("block", ["train", "command", "store"])
def test_a_new_field_of_a_block_with_both_kinds_needs_a_row_of_its_own(block: str) -> None:
    assert rule_of(f"{block}.a_new_field") is None


def test_the_same_spec_is_no_change_wherever_it_is_read(tmp_path: Path) -> None:
    spec = a_spec(cluster={"env": {"A": "b"}, "exclude": ["n1"]}).anchored(tmp_path)
    assert changed(spec, spec) == []
    assert changed(spec, PipelineSpec.model_validate_json(spec.model_dump_json())) == []


def test_what_a_run_may_change_is_told_and_carried_out() -> None:
    new = a_spec(
        cluster={"nodes": 4, "time_limit_min": 30},
        train={"checkpoint": {"every_steps": 50}, "micro_batch": 2},
        retention={"keep": {"last": 5}},
        logs={"keep_days": 1},
    )
    found = changes(recorded(a_spec()), new)
    require_same_run("r", found)
    lines = told(found, step=7)
    assert len(lines) == 6
    assert any("cluster.nodes: 1 -> 4" in line for line in lines)
    assert not any("ALTERS" in line for line in lines)


@pytest.mark.parametrize("nodes", [(1, "1-4"), ("1-4", 2), ("1-4", "2-4")])
def test_a_run_may_come_to_take_a_range_of_nodes_or_leave_it(nodes: tuple[Any, Any]) -> None:
    old, new = (a_spec(cluster={"nodes": count}) for count in nodes)
    (change,) = changes(recorded(old), new)
    require_same_run("r", [change])
    assert f"cluster.nodes: {nodes[0]} -> {nodes[1]}" in str(change)


def test_other_rates_are_told_with_the_step_from_which_on_they_hold() -> None:
    new = a_spec(train={"steps": 2000, "schedule": {"peak_lr": 1e-3}, "optimizer": {"eps": 1e-9}})
    found = changes(recorded(a_spec()), new)
    require_same_run("r", found)
    assert [line.rpartition("; ")[2] for line in told(found, step=120)] == [
        "it ALTERS the training, from step 120 on"
    ] * 3
    assert "from the first step on" in told(found, step=None)[0]


@pytest.mark.parametrize(
    "block",
    [
        {"train": {"model": {"dim": 256}}},
        {"train": {"sequence": 64}},
        {"train": {"global_batch": 128}},
        {"train": {"seed": 1}},
        {"train": {"param_dtype": "bfloat16"}},
        {"data": {"inputs": ["other/*.txt"]}},
        {"data": DATA | {"shard_tokens": 5000}},
        {"data": None, "command": {"argv": ["train.py"]}},
    ],
    ids=str,
)
def test_what_would_be_another_run_is_refused(block: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="headrace run SPEC --fork NEW"):
        require_same_run("r", changes(recorded(a_spec()), a_spec(**block)))


def test_a_refusal_names_every_field_with_both_values_and_nothing_that_may_change() -> None:
    new = a_spec(train={"seed": 5, "global_batch": 128}, cluster={"nodes": 2})
    with pytest.raises(SpecError) as refused:
        require_same_run("r", changes(recorded(a_spec()), new))
    message = str(refused.value)
    assert "train.seed: 0 -> 5 (it orders the samples)" in message
    assert "train.global_batch: 64 -> 128" in message
    assert "cluster.nodes" not in message
    assert "`run`" in message


def test_a_record_of_another_version_is_read_with_the_defaults_of_now() -> None:
    old = recorded(a_spec())
    del old["logs"], old["train"]["threads"], old["cluster"]["extra"], old["command"]
    del old["train"]["watchdog"]["factor"], old["data"]["exclude"]
    old["train"]["of_old"] = 1
    old["of_old"] = {"a": 1}
    assert changes(old, a_spec()) == ()
    assert [one.field for one in changes(old, a_spec(train={"threads": 2}))] == ["train.threads"]


def test_another_workdir_is_no_other_data(tmp_path: Path) -> None:
    """Anchoring excludes the workdir from the inputs, which must not pass for another data set."""
    store = {"embedded": {"directory": "store"}}
    old = a_spec(workdir="a", store=store).anchored(tmp_path)
    assert changed(old, a_spec(workdir="b", store=store).anchored(tmp_path)) == ["workdir"]
    excluded = a_spec(workdir="a", store=store, data=DATA | {"exclude": ["x"]}).anchored(tmp_path)
    assert changed(old, excluded) == ["data.exclude"]


def test_a_script_keeps_its_checkpoints() -> None:
    """Without a folder of its own it has one below the workdir, which must not move away."""
    old = a_spec(data=None, command={"argv": ["a"]})
    moved = a_spec(data=None, workdir="/elsewhere", command={"argv": ["a", "b"]})
    found = changes(recorded(old), moved)
    assert {one.field: one.rule.may for one in found} == {
        "workdir": True,
        "command.argv": True,
        "command.checkpoints": False,
    }
    named = {"argv": ["a"], "checkpoints": ".headrace/r/checkpoints"}
    assert changed(old, a_spec(data=None, command=named)) == []
