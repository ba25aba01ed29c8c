"""What Slurms of several versions really answered, and that each of them is understood alike.

The answers lie in `recorded/<version>/<situation>.txt`; the README there says how they were made.
They belong to the commands that the code issues, word for word: a command that is changed has to be
recorded again.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from slurm.answers import (
    accounting_by_ids,
    accounting_by_names,
    job_command,
    nodes_command,
    parse_accounting,
    parse_nodes,
    parse_queue,
    queue_command,
)
from slurm.cluster import JobState, SubmitDoubtful, SubmitLimited
from slurm.commands import CommandFailed, run_checked
from slurm.diagnose import diagnose, refusal
from slurm.evidence import Evidence
from slurm.patience import NO_ANSWER, TRIES, PatientCommands
from slurm.pending import explain
from slurm.spec import ClusterSpec
from slurm.submit import SlurmCluster, read_answer
from storage.errors import SubmitRejected
from tests.slurm.attempts import NOW, an_attempt
from tests.slurm.recorded.expected import (
    ACCEPTED_ALL_THE_SAME,
    ENDS,
    FIELDS,
    KINDS,
    LIVES,
    NEVER_ELIGIBLE,
    NODES,
    REJECTED,
    UNLIKE,
)
from tests.slurm.recorded.reading import (
    RECORDED,
    UID,
    VERSIONS,
    Replay,
    everywhere,
    recorded,
    views,
)


@pytest.mark.parametrize(("version", "situation"), everywhere(ENDS))
def test_an_end_is_understood_alike_in_every_version(version: str, situation: str) -> None:
    seen = views(version, situation)
    end = UNLIKE.get((version, situation), ENDS[situation])
    assert seen.by_id is not None
    assert seen.controller is not None
    for view in (seen.queue, seen.by_id, seen.controller):
        assert (view.state, view.job_id) == (JobState.ENDED, seen.job_id)
        assert len(view.nodes) == end.nodes
    assert seen.queue.raw_state == seen.controller.raw_state == end.word
    assert seen.by_id.raw_state == (end.accounting_word or end.word)
    assert (seen.by_id.exit_code, seen.by_id.derived_exit_code) == (end.code, end.derived)
    assert seen.controller.exit_code == (end.controller_code or end.code)
    assert seen.controller.derived_exit_code == (end.controller_derived or end.derived)
    steps = {step.name: (step.state, step.exit_code) for step in seen.by_id.steps}
    assert steps == end.steps
    assert seen.by_id.memory_asked


@pytest.mark.parametrize(("version", "situation"), everywhere(ENDS))
def test_accounting_says_the_same_by_name_of_what_was_ever_ready_to_start(
    version: str, situation: str
) -> None:
    seen = views(version, situation)
    if situation in NEVER_ELIGIBLE:
        assert seen.by_name is None
    elif situation == "requeued-cancelled":
        assert seen.by_name is not None
        assert seen.by_name.raw_state == "REQUEUED"
    else:
        assert seen.by_name == seen.by_id


@pytest.mark.parametrize(("version", "situation"), everywhere(KINDS))
def test_an_end_has_the_same_cause_in_every_version(version: str, situation: str) -> None:
    evidence = Evidence(attempt=an_attempt(), job=views(version, situation).by_id, now=NOW, uid=UID)
    assert diagnose(evidence).kind is KINDS[situation]


@pytest.mark.parametrize(("version", "situation"), everywhere(LIVES))
def test_a_job_that_lives_is_seen_alive_in_every_version(version: str, situation: str) -> None:
    seen, life = views(version, situation), LIVES[situation]
    waits = life.word in {"PENDING", "CONFIGURING", "SPECIAL_EXIT"}
    assert seen.controller is not None
    for view in (seen.queue, seen.controller):
        assert view.state is (JobState.PENDING if waits else JobState.RUNNING)
        assert (view.job_id, view.raw_state) == (seen.job_id, life.word)
        assert len(view.nodes) == life.nodes


@pytest.mark.parametrize(
    ("version", "situation"), everywhere([name for name, life in LIVES.items() if life.outlook])
)
def test_why_a_job_waits_is_known_in_every_version(version: str, situation: str) -> None:
    life, reason = LIVES[situation], explain(views(version, situation).queue.reason)
    assert reason.outlook is life.unlike.get(version, life.outlook)
    assert reason.words


@pytest.mark.parametrize("version", VERSIONS)
def test_an_array_whose_elements_have_ended_is_as_good_as_its_worst(version: str) -> None:
    seen = views(version, "array-ended")
    assert seen.by_id is not None
    assert (seen.by_id.state, seen.by_id.raw_state) == (JobState.ENDED, "FAILED")
    assert (seen.queue.state, seen.queue.job_id) == (JobState.ENDED, seen.job_id)
    assert set(seen.queue.nodes) == set(seen.by_id.nodes) == {"n1", "n2"}


@pytest.mark.parametrize("version", VERSIONS)
def test_any_name_of_a_job_leaves_the_others_readable(version: str) -> None:
    queue, by_name, by_id, _ = recorded(version, "odd-name")
    name = 'odd|name "x" %j é\\n'
    assert parse_queue(queue.stdout)[name].raw_state == "COMPLETED"
    in_accounting = name.replace('"', "`")
    for accounting in (by_name, by_id):
        assert list(parse_accounting(accounting.stdout)) == [in_accounting]


@pytest.mark.parametrize(("version", "situation"), everywhere(NODES))
def test_nodes_are_judged_alike_in_every_version(version: str, situation: str) -> None:
    default, named = recorded(version, situation)
    expected = NODES[situation]
    nodes = parse_nodes(default.stdout, partition=None)
    assert [node.name for node in nodes] == ["n1", "n2", "n3", "n4"]
    assert parse_nodes(named.stdout, partition="high") == nodes
    for node in nodes:
        assert re.fullmatch(expected.states.get(node.name, "idle"), node.raw_state)
        assert node.responds is (node.name not in expected.silent)
        assert node.idle is (node.name in expected.idle or node.name not in expected.states)
        assert node.reason == expected.reasons.get(node.name, "")


@pytest.mark.parametrize(
    ("version", "situation"), everywhere([f"sbatch-{what}" for what in REJECTED])
)
def test_a_refusal_is_a_refusal_in_every_version(version: str, situation: str) -> None:
    (result,) = recorded(version, situation)
    if (version, situation.removeprefix("sbatch-")) in ACCEPTED_ALL_THE_SAME:
        assert read_answer(result).isdecimal()
        return
    with pytest.raises(SubmitRejected) as caught:
        read_answer(result)
    assert not isinstance(caught.value, SubmitLimited)
    assert result.stderr.strip().splitlines()[-1] in str(caught.value)


@pytest.mark.parametrize(
    ("version", "situation"), everywhere([f"sbatch-{what}" for what in FIELDS])
)
def test_a_refusal_names_the_field_of_the_spec(version: str, situation: str) -> None:
    (result,) = recorded(version, situation)
    found = refusal(str(CommandFailed(result)))
    assert FIELDS[situation.removeprefix("sbatch-")] in found.message
    last = result.stderr.strip().splitlines()[-1]
    assert any(last in line for line in found.evidence[1:])


@pytest.mark.parametrize("version", VERSIONS)
def test_one_job_too_many_is_a_refusal_for_now(version: str) -> None:
    (result,) = recorded(version, "sbatch-qos-submit-limit")
    with pytest.raises(SubmitLimited, match="QOSMaxSubmitJobPerUserLimit"):
        read_answer(result)


@pytest.mark.parametrize(
    ("version", "situation"),
    everywhere(["sbatch-accepted", "sbatch-closed-partition", "sbatch-closed-down-partition"]),
)
def test_an_accepted_job_has_its_id(version: str, situation: str) -> None:
    (result,) = recorded(version, situation)
    assert read_answer(result) == result.stdout.split()[-1]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_refused_job_leaves_one_of_its_name_that_never_ran(version: str) -> None:
    """Whoever looks for the token of an sbatch without an answer may find it: it is over."""
    sbatch, queue, accounting = recorded(version, "sbatch-refused-record")
    with pytest.raises(SubmitRejected):
        read_answer(sbatch)
    for found in (parse_queue(queue.stdout), parse_accounting(accounting.stdout)):
        left = found["toobig-1"]
        assert (left.state, left.raw_state, left.nodes) == (JobState.ENDED, "FAILED", ())


OUTAGES = ("slurmctld-down", "slurmctld-stalled", "munge-gone")


@pytest.mark.parametrize(("version", "situation"), everywhere(OUTAGES))
def test_an_outage_says_nothing_about_any_job(version: str, situation: str) -> None:
    for result in recorded(version, situation):
        assert result.returncode > 0
        assert not result.stdout
        assert NO_ANSWER.search(result.stderr)
        if result.command[0] == "sbatch":
            with pytest.raises(SubmitDoubtful):
                read_answer(result)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("situation", "tries"), [("slurmctld-down", TRIES), ("munge-gone", 1)])
def test_only_an_outage_of_the_controller_is_asked_about_again(
    version: str, situation: str, tries: int
) -> None:
    replay = Replay(version, situation)
    patient = PatientCommands(replay, sleep=lambda _: None)
    with pytest.raises(CommandFailed):
        run_checked(patient, queue_command(uid=UID))
    assert len(replay.asked) == tries


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_that_is_unknown_needs_no_cancelling(version: str) -> None:
    replay = Replay(version, "unknown-job")
    SlurmCluster(ClusterSpec(kind="slurm"), commands=replay).cancel(job_id="99999", token="gone")
    assert [command[0] for command in replay.asked] == ["squeue"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_that_ends_before_it_is_cancelled_needs_no_cancelling(version: str) -> None:
    replay = Replay(version, "cancel-ended")
    listed, scancel, *_ = recorded(version, "cancel-ended")
    assert scancel.returncode == 1
    replay.answers[listed.command] = replace(listed, stdout="done-1\n")
    cluster = SlurmCluster(ClusterSpec(kind="slurm"), commands=replay)
    cluster.cancel(job_id=scancel.command[-1], token="done-1")
    assert replay.asked == [listed.command, scancel.command]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_user_that_cannot_be_looked_up_has_no_empty_queue(version: str) -> None:
    """The name service of a host may be down for a while; 25.05 does without it."""
    replay = Replay(version, "unknown-user")
    command = queue_command(uid=4242)
    if version in {"25.05", "26.05"}:
        assert parse_queue(run_checked(replay, command)) == {}
        return
    with pytest.raises(CommandFailed, match="Invalid user"):
        run_checked(replay, command)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_not_there_is_empty_and_no_error(version: str) -> None:
    (accounting,) = recorded(version, "empty-accounting")
    assert (
        parse_accounting(run_checked(Replay(version, "empty-accounting"), accounting.command)) == {}
    )
    (partition,) = recorded(version, "unknown-partition")
    assert parse_nodes(partition.stdout, partition="nowhere") == ()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("situation", ["accounting-disabled", "slurmdbd-down", "slurmdbd-stalled"])
def test_accounting_that_is_away_fails_and_is_not_empty(version: str, situation: str) -> None:
    (accounting,) = recorded(version, situation)
    with pytest.raises(CommandFailed, match=r"disabled|Problem talking to the database"):
        run_checked(Replay(version, situation), accounting.command)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_cluster_has_its_name(version: str) -> None:
    assert SlurmCluster(ClusterSpec(kind="slurm"), commands=Replay(version, "config")).name == "hpc"


def _as_asked_now(command: tuple[str, ...]) -> list[str] | None:
    """The command that the code issues today in place of a recorded one."""
    told = dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
    match command:
        case ("squeue", *_) if "user" in told:
            return queue_command(uid=int(told["user"]))
        case ("sacct", *_) if "name" in told:
            return accounting_by_names(uid=int(told["user"]), names=[told["name"]])
        case ("sacct", *_):
            return accounting_by_ids(uid=int(told["user"]), job_ids=[told["jobs"]])
        case ("sinfo", *_):
            return nodes_command(partition=told.get("partition"))
        case ("scontrol", *_, "job", job_id):
            return job_command(job_id)
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_what_was_recorded_is_what_is_asked(version: str) -> None:
    for path in sorted((RECORDED / version).glob("*.txt")):
        for result in recorded(version, path.stem):
            now = _as_asked_now(result.command)
            assert now is None or tuple(now) == result.command, path.stem
