"""Every reason that Slurm gives for waiting is waited for, told, or given up, in plain words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.pending import Outlook, explain

# What limits are set on, as reasons of different ages spell it.
_RESOURCES = (
    "BB",
    "Billing",
    "Cpu",
    "Energy",
    "GRES",
    "License",
    "Mem",
    "Memory",
    "Node",
    "Unknown",
)

WAITED_FOR = {
    "None",
    "Prolog",
    "Priority",
    "Resources",
    "BeginTime",
    "Licenses",
    "Reservation",
    "SchedDefer",
    "Cleaning",
    "JobArrayTaskLimit",
    "BurstBufferResources",
    "BurstBufferStageIn",
    "PowerNotAvail",
    "PowerReserved",
    "FedJobLock",
    "AssociationJobLimit",
    "AssociationResourceLimit",
    "QOSJobLimit",
    "QOSResourceLimit",
    "QOSGrpJobsLimit",
    "QOSGrpSubmitJobsLimit",
    "QOSMaxJobsPerUserLimit",
    "QOSMaxSubmitJobPerUserLimit",
    "AssocGrpJobsLimit",
    "AssocMaxJobsLimit",
    "AssocMaxSubmitJobLimit",
    "AssocGrpCPURunMinutesLimit",
    "QOSGrpCPURunMinutesLimit",
    "MaxJobsPerAccount",
    "MaxSubmitJobsPerAccount",
    *(f"{who}Grp{what}" for who in ("QOS", "Assoc") for what in _RESOURCES),
    *(f"{who}Grp{what}Limit" for who in ("QOS", "Assoc") for what in _RESOURCES),
    *(f"{who}Grp{what}RunMinutes" for who in ("QOS", "Assoc") for what in _RESOURCES),
    *(f"QOSMax{what}PerUser" for what in _RESOURCES),
    *(f"QOSMax{what}PerUserLimit" for what in _RESOURCES),
    *(f"Max{what}PerAccount" for what in _RESOURCES),
}
TOLD = {
    "Dependency",
    "JobHeldUser",
    "JobHeldAdmin",
    "JobHoldMaxRequeue",
    "JobLaunchFailure",
    "SystemFailure",
    "job requeued in held state",
    "ReqNodeNotAvail",
    "ReqNodeNotAvail, May be reserved for other job",
    "ReqNodeNotAvail, Reserved for maintenance",
    "ReqNodeNotAvail(Unavailable:n[1-2])",
    "NodeDown",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    "PartitionDown",
    "PartitionInactive",
    "PartitionNodeLimit",
    "PartitionConfig",
    "Constraints",
    "ReservationDeleted",
    "ReservationInvalid",
    "FrontEndDown",
    "BurstBufferOperation",
    "DeadLine",
    "InvalidAccount",
    "InvalidQOS",
    "QOSUsageThreshold",
    "QOSTimeLimit",
    "AssociationTimeLimit",
    "AccountingPolicy",
    "QOSGrpWallLimit",
    "AssocGrpWallLimit",
    "QOSGrpCPUMinutesLimit",
    "AssocGrpCPUMinutesLimit",
    *(f"{who}Grp{what}Minutes" for who in ("QOS", "Assoc") for what in _RESOURCES),
}
GIVEN_UP = {
    "BadConstraints",
    "DependencyNeverSatisfied",
    "launch failed requeued held",
    "launch failure limit exceeded requeued held",
}
GIVEN_UP_IN_ONE_PARTITION = {
    "PartitionTimeLimit",
    "AccountNotAllowed",
    "QOSNotAllowed",
    "MaxMemPerLimit",
    "QOSMinCpuNotSatisfied",
    *(f"QOSMin{what}" for what in _RESOURCES),
    *(f"{who}MaxWallDurationPerJobLimit" for who in ("QOS", "Assoc")),
    *(f"{who}MaxCpuMinutesPerJobLimit" for who in ("QOS", "Assoc")),
    *(
        f"{who}Max{what}{per}"
        for who in ("QOS", "Assoc")
        for what in _RESOURCES
        for per in ("PerJob", "PerJobLimit", "PerNode", "MinutesPerJob")
    ),
}


@pytest.mark.parametrize(
    ("reasons", "outlook"),
    [
        (WAITED_FOR, Outlook.WAIT),
        (TOLD, Outlook.TELL),
        (GIVEN_UP | GIVEN_UP_IN_ONE_PARTITION, Outlook.GIVE_UP),
    ],
)
def test_each_reason_has_its_outlook_and_words(reasons: set[str], outlook: Outlook) -> None:
    found = {reason: explain(reason) for reason in reasons}
    assert {reason: one.outlook for reason, one in found.items()} == dict.fromkeys(reasons, outlook)
    assert [reason for reason, one in found.items() if not one.words] == []


def test_what_is_said_of_one_partition_ends_nothing_where_another_may_take_the_job() -> None:
    for reason in GIVEN_UP_IN_ONE_PARTITION:
        assert explain(reason, one_partition=False).outlook is Outlook.TELL
    for reason in GIVEN_UP:
        assert explain(reason, one_partition=False).outlook is Outlook.GIVE_UP


def test_nodes_that_are_not_available_are_named_but_the_reason_stays_the_same() -> None:
    found = explain("ReqNodeNotAvail, UnavailableNodes:n[2-3],gpu7")
    assert found.name == "ReqNodeNotAvail"
    assert found.words.endswith("(not available: n[2-3],gpu7)")


def test_a_reason_that_is_not_known_is_waited_for_and_shown_as_it_is() -> None:
    found = explain("SomethingNew, with words")
    assert (found.outlook, str(found)) == (Outlook.WAIT, "SomethingNew, with words")


@given(st.text())
def test_no_reason_is_too_strange(reason: str) -> None:
    assert explain(reason).outlook is Outlook.WAIT or explain(reason).words
