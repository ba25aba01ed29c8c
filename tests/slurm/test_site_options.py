"""Options of a site: what a spec may say, and what each mistake is told in its place."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from slurm.commands import SystemCommands, run_checked
from slurm.devcluster import DevCluster
from slurm.site_options import _FIELDS, _FREE, _OURS, checked_extra
from slurm.spec import ClusterSpec


def mistake(**fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        ClusterSpec(**fields)
    (error,) = caught.value.errors()
    return str(error["msg"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"job-name": "mine"}, "`job-name` is Headrace's own: it is the attempt's token"),
        ({"--requeue": True}, "retries have one owner"),
        ({"no_requeue": True}, "it is always given"),
        ({"mem": "4G"}, "use cluster.memory_per_node instead"),
        ({"Mem-Per-CPU": "4G"}, "of lower-case letters"),
        ({"tasks-per-node": 4}, "use cluster.ranks_per_node instead"),
        ({"p": "gpu"}, "write `partition`"),
        ({"-J": "mine"}, "write `job-name`"),
        ({"z": 1}, "write its long name"),
        ({"exp": "NONE"}, "`exp`, which sbatch reads as --export, is Headrace's own"),
        ({"tim": 5}, "which sbatch reads as --time, has a field of its own"),
        ({"container-image": "x"}, "use cluster.container"),
        ({"comment=x": True}, "without its value"),
        ({"comment": "two\nlines"}, "on one line"),
        ({"comment": ""}, "1 to 1000 characters"),
        ({"nice": 1.5}, "put it in quotes"),
        ({"nice": None}, "put it in quotes"),
        ({"nice": [1]}, "put it in quotes"),
        ({"--nice": 1, "nice": 2}, "both name --nice; keep one"),
    ],
)
def test_an_option_that_headrace_relies_on_is_refused_with_what_to_use(
    given: dict[str, Any], words: str
) -> None:
    assert words in mistake(extra=given)


def test_other_options_go_in_under_sbatchs_own_names() -> None:
    given = {"--switches": "1@00:10:00", "mail_type": "END", "exclusive": True, "my-plugin": 3}
    assert checked_extra(given) == {
        "switches": "1@00:10:00",
        "mail-type": "END",
        "exclusive": True,
        "my-plugin": 3,
    }


@given(st.sampled_from(sorted({*_OURS, *_FIELDS})), st.integers(2, 40))
def test_no_beginning_of_a_name_slips_through(option: str, length: int) -> None:
    """sbatch takes a long option by any beginning that no other one shares."""
    name = option[:length]
    if name in _FREE or name.endswith("-"):
        return
    with pytest.raises(ValueError, match=re.escape(name)):
        checked_extra({name: "x"})


@pytest.mark.slurm
def test_every_option_of_this_sbatch_is_in_one_table(dev_cluster: DevCluster) -> None:
    """What sbatch's own help lists is either free, or refused by name: nothing is forgotten."""
    commands = SystemCommands(slurm_conf=dev_cluster.slurm_conf)
    shown = run_checked(commands, ["sbatch", "--help"])
    known = set(re.findall(r"--([a-z][a-z0-9-]*)", shown))
    assert len(known) > 60
    assert known <= {*_OURS, *_FIELDS, *_FREE}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"partition": "a,b"}, "several as in `[gpu, gpu-long]`"),
        ({"partition": []}, "partition's name or a list"),
        ({"partition": ["a", 3]}, "partition's name or a list"),
        ({"account": "a b"}, "one name that Slurm knows"),
        ({"qos": "--qos=x"}, "one name that Slurm knows"),
        ({"reservation": "x\n#SBATCH --uid=0"}, "one name that Slurm knows"),
        ({"constraint": "a100 nvlink"}, "write it as in 'a100&nvlink'"),
        ({"mpi": "list"}, "srun --mpi=list"),
        ({"modules": ["cuda; rm -r x"]}, "give each its own item"),
        ({"conda": "envs/mine"}, "write it in full"),
        ({"env": {"SLURM_NTASKS": "3"}}, "for Slurm or Headrace to set"),
        ({"env": {"SBATCH_QOS": "high"}}, "for Slurm or Headrace to set"),
    ],
)
def test_a_site_field_says_its_bound_and_its_remedy(fields: dict[str, Any], words: str) -> None:
    assert words in mistake(**fields)


def test_a_partition_is_one_name_or_several() -> None:
    assert ClusterSpec().partitions == ()
    assert ClusterSpec(partition="gpu").partitions == ("gpu",)
    assert ClusterSpec(partition=["gpu", "spare", "gpu"]).partitions == ("gpu", "spare")  # type: ignore[arg-type]
    again = ClusterSpec(partition=("gpu", "spare")).model_dump(mode="json")
    assert ClusterSpec.model_validate(again).partitions == ("gpu", "spare")
