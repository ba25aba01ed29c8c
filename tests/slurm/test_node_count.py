"""How many nodes: a number stays what it always was, and a range means the same everywhere."""

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from slurm.node_count import MOST, bounds, spell
from slurm.spec import ClusterSpec

COUNTS = st.integers(1, MOST)


@given(one=COUNTS, other=COUNTS, blank=st.sampled_from(["", " "]))
def test_a_range_is_kept_as_slurm_writes_it_and_one_of_a_single_number_is_that_number(
    one: int, other: int, blank: str
) -> None:
    least, most = sorted((one, other))
    spec = ClusterSpec(nodes=f"{least}{blank}-{blank}{most}")
    assert (spec.least_nodes, spec.most_nodes) == (least, most) == bounds(spec.nodes)
    assert spec.nodes == (most if least == most else spell(least, most))
    assert spec.range_end == (None if least == most else most)
    assert ClusterSpec.model_validate_json(spec.model_dump_json()) == spec


@given(COUNTS)
def test_a_number_is_a_number_in_python_and_in_json(count: int) -> None:
    spec = ClusterSpec(nodes=count)
    assert type(spec.nodes) is int
    assert spec.model_dump(mode="json")["nodes"] == count
    assert (spec.least_nodes, spec.most_nodes, spec.range_end) == (count, count, None)


@given(st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.lists(st.integers())))
def test_whatever_else_is_one_error_about_that_field(value: object) -> None:
    try:
        spec = ClusterSpec(nodes=value)
    except ValidationError as error:
        (one,) = error.errors()
        assert one["loc"] == ("nodes",)
    else:
        assert 1 <= spec.least_nodes <= spec.most_nodes <= MOST


@pytest.mark.parametrize("value", [16, "14-16", "14 - 16"])
def test_the_schema_by_which_prefect_checks_a_form_takes_what_the_spec_takes(value: object) -> None:
    jsonschema.validate({"nodes": value}, ClusterSpec.model_json_schema())


@pytest.mark.parametrize("value", [0, MOST + 1, 1.5, "14-", "four", [14, 16], None])
def test_the_schema_refuses_what_the_spec_refuses(value: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"nodes": value}, ClusterSpec.model_json_schema())
