"""What is said of jobs: by the queue, by accounting that lags or is silent, by the controller."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from slurm.cluster import JobObservation, JobState
from slurm.commands import CommandResult
from slurm.watch import LAG_S, LONGEST_S, Watch
from storage.errors import SlurmError

DOWN = "sacct: error: Problem talking to the database: Connection refused"
DISABLED = "Slurm accounting storage is disabled"


@dataclass
class Slurm:
    """What each command prints, and a clock that stands but for a moment a command."""

    queue: str = ""
    accounts: str = ""
    memory: dict[str, str] = field(default_factory=dict)
    no_queue: str = ""
    no_accounts: str = ""
    now_s: float = 1000.0
    seen: list[list[str]] = field(default_factory=list)

    def run(self, command: Sequence[str], *, timeout_s: float = 60.0) -> CommandResult:
        self.seen.append(list(command))
        self.now_s += 0.001
        match command[0]:
            case "squeue":
                stdout, stderr = self.queue, self.no_queue
            case "sacct":
                stdout, stderr = self.accounts, self.no_accounts
            case "scontrol":
                stdout = self.memory.get(command[-1], "")
                unknown = "slurm_load_jobs error: Invalid job id specified"
                stderr = self.no_queue or ("" if stdout else unknown)
            case other:
                raise AssertionError(other)
        return CommandResult(
            command=tuple(command), returncode=int(bool(stderr)), stdout=stdout, stderr=stderr
        )

    def watch(self) -> Watch:
        return Watch(self, clock=lambda: self.now_s)

    @property
    def asked(self) -> list[str]:
        """The commands since the last question."""
        names = [command[0] for command in self.seen]
        self.seen.clear()
        return names

    def later(self, watch: Watch, *tokens: str, by_s: float = 1.0) -> Mapping[str, JobObservation]:
        self.now_s += by_s
        return watch.observe(tokens)


def in_memory(job_id: str, token: str, *, exit_code: str = "9:0") -> str:
    return (
        f"JobId={job_id} JobName={token} JobState=FAILED Reason=NonZeroExitCode "
        f"ExitCode={exit_code} DerivedExitCode=0:0 NodeList=n1 Power=\n"
    )


def test_many_jobs_cost_one_look_at_the_queue_and_one_at_accounting() -> None:
    slurm = Slurm()
    watch = slurm.watch()
    watch.observe([f"t{number}" for number in range(50)])
    assert slurm.asked == ["squeue", "sacct"]
    assert watch.observe([]) == {}
    assert slurm.asked == []


def test_a_batch_of_jobs_that_ended_costs_one_sacct_by_their_ids() -> None:
    tokens = [f"t{number}" for number in range(200)]
    slurm = Slurm(queue="".join(f"{n}|RUNNING|n1|None|t{n}\n" for n in range(200)))
    watch = slurm.watch()
    watch.observe(tokens)
    assert slurm.asked == ["squeue"]
    slurm.queue = ""
    slurm.accounts = "".join(
        f"{n}|COMPLETED|0:0|0:0|1G||n1|t{n}\n{n}.batch|COMPLETED|0:0|||9K|n1|batch\n"
        for n in range(200)
    )
    found = slurm.later(watch, *tokens)
    assert {one.state for one in found.values()} == {JobState.ENDED}
    assert found["t7"].steps[0].max_rss == "9K"
    _squeue, sacct = slurm.seen
    assert f"--jobs={','.join(map(str, range(200)))}" in sacct
    slurm.seen.clear()
    for _ in range(5):
        assert slurm.later(watch, *tokens, by_s=60.0) == found
    assert set(slurm.asked) == {"squeue"}


def test_what_accounting_lacks_is_asked_for_again_all_at_once_and_ever_less_often() -> None:
    slurm = Slurm(queue="1|COMPLETED|n1|None|a\n2|COMPLETED|n1|None|b\n")
    watch = slurm.watch()
    asked_at_s = []
    for _ in range(240):
        found = slurm.later(watch, "a", "b", by_s=0.5)
        if "sacct" in slurm.asked:
            asked_at_s.append(slurm.now_s)
        assert (found["a"].state, found["a"].exit_code) == (JobState.ENDED, "")
    distances = [after - before for before, after in itertools.pairwise(asked_at_s)]
    assert len(distances) == 8
    assert distances == sorted(distances)
    assert max(distances) < 2 * LONGEST_S

    slurm.accounts = "1|FAILED|3:0|0:0|1G||n1|a\n1.0|RUNNING|0:0|||||python\n"
    slurm.now_s += LONGEST_S
    found = watch.observe(["a", "b"])
    assert (found["a"].exit_code, found["b"].exit_code) == ("3:0", "")
    slurm.accounts = "1|FAILED|3:0|0:0|1G||n1|a\n1.0|FAILED|3:0|||7K|n1|python\n"
    slurm.now_s += LONGEST_S
    assert watch.observe(["a"])["a"].steps[0].state == "FAILED", "its step had yet to end"


def test_only_the_queue_can_say_that_a_job_lives() -> None:
    slurm = Slurm(accounts="7|RUNNING|0:0|0:0|1G||n1|a\n")
    found = slurm.watch().observe(["a"])["a"]
    assert (found.state, found.raw_state) == (JobState.ABSENT, "RUNNING")


@pytest.mark.parametrize("why", [DOWN, DISABLED])
def test_without_accounting_the_controllers_memory_serves_once_for_each_job(why: str) -> None:
    slurm = Slurm(
        queue="7|RUNNING|n1|None|a\n8|FAILED|n1|NonZeroExitCode|b\n",
        no_accounts=why,
        memory={"8": in_memory("8", "b")},
    )
    watch = slurm.watch()
    for _ in range(100):
        found = slurm.later(watch, "a", "b")
    assert found["a"].state is JobState.RUNNING
    assert (found["b"].state, found["b"].raw_state) == (JobState.ENDED, "FAILED")
    assert (found["b"].exit_code, found["b"].nodes) == ("9:0", ("n1",))
    assert found["b"].accounting_silence == (
        "" if why is DISABLED else found["b"].accounting_silence
    )
    asked = slurm.asked
    assert asked.count("scontrol") == 1
    assert asked.count("sacct") < 10

    slurm.queue, slurm.memory = "", {}
    forgotten = slurm.later(watch, "b")["b"]
    assert (forgotten.state, forgotten.exit_code) == (JobState.ENDED, "9:0")


def test_silent_accounting_is_not_asked_about_each_job_that_ends() -> None:
    slurm = Slurm(no_accounts=DOWN)
    watch = slurm.watch()
    tokens = [f"t{number}" for number in range(60)]
    for number, token in enumerate(tokens):
        slurm.queue += f"{number}|FAILED|n1|None|{token}\n"
        slurm.memory[str(number)] = in_memory(str(number), token)
        found = slurm.later(watch, *tokens[: number + 1])
        assert found[token].exit_code == "9:0"
    asked = slurm.asked
    assert asked.count("sacct") < 10
    assert asked.count("scontrol") == len(tokens)


def test_a_silence_of_accounting_is_told_and_what_it_says_afterwards_counts() -> None:
    slurm = Slurm(queue="8|FAILED|n1|None|b\n", no_accounts=DOWN, memory={"8": in_memory("8", "b")})
    watch = slurm.watch()
    assert "Connection refused" in watch.observe(["b"])["b"].accounting_silence
    slurm.no_accounts = ""
    slurm.accounts = (
        "8|OUT_OF_MEMORY|0:125|0:0|1G||n1|b\n8.batch|OUT_OF_MEMORY|0:125|||1G|n1|batch\n"
    )
    found = slurm.later(watch, "b", by_s=LONGEST_S)["b"]
    assert (found.raw_state, found.accounting_silence) == ("OUT_OF_MEMORY", "")


def test_what_accounting_has_only_in_part_replaces_nothing_that_the_controller_said() -> None:
    slurm = Slurm(queue="8|FAILED|n1|None|b\n", no_accounts=DOWN, memory={"8": in_memory("8", "b")})
    watch = slurm.watch()
    assert watch.observe(["b"])["b"].exit_code == "9:0"
    slurm.no_accounts = ""
    for part in ("8|FAILED|0:0|0:0|1G||n1|b\n", "8|FAILED|9:0|0:0|1G||n1|b\n"):
        slurm.accounts = part
        found = slurm.later(watch, "b", by_s=LONGEST_S)["b"]
        assert (found.exit_code, found.steps) == ("9:0", ())
    slurm.accounts += "8.batch|FAILED|9:0|||5K|n1|batch\n"
    assert slurm.later(watch, "b", by_s=LONGEST_S)["b"].steps[0].max_rss == "5K"


def test_a_job_that_nobody_knows_while_accounting_is_silent_is_absent_and_not_unknown() -> None:
    slurm = Slurm(queue="7|RUNNING|n1|None|a\n", no_accounts=DOWN)
    watch = slurm.watch()
    watch.observe(["a", "never"])
    slurm.queue = ""
    found = slurm.later(watch, "a", "never")
    for one in found.values():
        assert one.state is JobState.ABSENT
        assert "accounting is silent" in one.reason
        assert "Connection refused" in one.reason


def test_without_accounting_an_unseen_job_is_absent_and_nothing_is_amiss() -> None:
    slurm = Slurm(no_accounts=DISABLED)
    found = slurm.watch().observe(["a"])
    assert found == {"a": JobObservation(token="a", state=JobState.ABSENT)}


def test_accounting_that_answers_but_stays_behind_is_not_waited_for_for_ever() -> None:
    slurm = Slurm(queue="8|FAILED|n1|None|b\n", memory={"8": in_memory("8", "b")})
    watch = slurm.watch()
    assert watch.observe(["b"])["b"].exit_code == ""
    found = [slurm.later(watch, "b", by_s=0.5)["b"] for _ in range(int(4 * LAG_S))]
    assert found[-1].exit_code == "9:0"
    assert slurm.asked.count("scontrol") == 1


def test_an_id_that_another_job_has_got_says_nothing_of_ours() -> None:
    slurm = Slurm(queue="8|FAILED|n1|None|b\n", memory={"8": in_memory("8", "other")})
    slurm.accounts = "8|COMPLETED|0:0|0:0|1G||n1|other\n"
    watch = slurm.watch()
    for _ in range(30):
        found = slurm.later(watch, "b")["b"]
    assert (found.raw_state, found.exit_code) == ("FAILED", "")


def test_a_job_that_lives_again_is_followed_again() -> None:
    slurm = Slurm(accounts="8|PREEMPTED|0:0|0:0|1G||n1|b\n")
    watch = slurm.watch()
    assert watch.observe(["b"])["b"].raw_state == "PREEMPTED"
    slurm.queue = "8|RUNNING|n2|None|b\n"
    assert slurm.later(watch, "b")["b"].state is JobState.RUNNING
    slurm.queue, slurm.accounts = "", "8|COMPLETED|0:0|0:0|1G||n2|b\n"
    assert slurm.later(watch, "b")["b"].raw_state == "COMPLETED"


def test_the_controller_that_is_down_is_an_error_and_no_end_of_a_job() -> None:
    slurm = Slurm(queue="8|RUNNING|n2|None|b\n")
    watch = slurm.watch()
    watch.observe(["b"])
    slurm.no_queue = "slurm_load_jobs error: Unable to contact slurm controller"
    for _ in range(3):
        with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
            slurm.later(watch, "b")
    slurm.no_queue = ""
    assert slurm.later(watch, "b", by_s=LONGEST_S)["b"].state is JobState.RUNNING


def test_what_is_asked_for_the_first_time_is_not_answered_from_before() -> None:
    slurm = Slurm()
    watch = slurm.watch()
    watch.observe(["a"])
    slurm.queue = "1|PENDING||Priority|new\n"
    slurm.now_s += 0.1
    assert watch.observe(["a", "new"])["new"].state is JobState.PENDING


def test_after_an_sbatch_nothing_older_is_believed() -> None:
    slurm = Slurm()
    watch = slurm.watch()
    assert watch.observe(["a"])["a"].state is JobState.ABSENT
    slurm.queue = "1|PENDING||Priority|a\n"
    slurm.now_s += 0.1
    assert watch.observe(["a"])["a"].state is JobState.ABSENT, "it was looked at just now"
    watch.look_anew()
    assert watch.observe(["a"])["a"].state is JobState.PENDING


def test_a_patient_engine_takes_what_is_no_older_than_its_own_distance() -> None:
    slurm = Slurm()
    watch = slurm.watch()
    for by_s, expected in ((20.0, 1), (20.0, 1), (0.2, 0), (0.2, 0), (0.2, 1)):
        watch_asked = slurm.later(watch, "a", by_s=by_s)
        assert watch_asked["a"].state is JobState.ABSENT
        assert slurm.asked.count("squeue") == expected


def test_a_command_line_stays_within_what_a_kernel_takes() -> None:
    slurm = Slurm()
    tokens = [f"{number:0100d}" for number in range(3000)]
    slurm.watch().observe(tokens)
    lines = [command for command in slurm.seen if command[0] == "sacct"]
    assert len(lines) == 4
    assert max(len(part) for line in lines for part in line) < 128 * 1024
    asked = [re.findall(r"\d{100}", part) for line in lines for part in line if "--name" in part]
    assert sorted(name for some in asked for name in some) == tokens
