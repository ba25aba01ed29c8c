"""A wrong spec is told in one line for each mistake; a right one means the same everywhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from flows.loading import SpecFileError, load_spec
from storage.errors import SpecError
from storage.shards.inputs import freeze_inputs

LEAST = "run: a\ndata: {inputs: [x]}\n"


@pytest.fixture
def write(tmp_path: Path):
    def write_text(text: str | bytes) -> Path:
        path = tmp_path / "spec.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_text


def told(path: Path, **environ: str) -> list[str]:
    """The lines of the error, without the path that begins each."""
    with pytest.raises(SpecFileError) as caught:
        load_spec(path, environ=environ)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}:") for line in lines)
    return [line.removeprefix(f"{path}:").strip() for line in lines]


def test_the_least_spec_loads_with_defaults(write) -> None:
    spec = load_spec(write(LEAST))
    assert spec.run == "a"
    assert spec.cluster.kind == "local"
    assert spec.store.is_embedded


@pytest.mark.parametrize(
    ("text", "line", "field", "parts"),
    [
        ("cluster:\n  nodes: 0", 4, "cluster.nodes", ["value 0", "at least 1", "raise it"]),
        ("cluster: {nodes: 1.5}", 3, "cluster.nodes", ["value 1.5", "whole number"]),
        ("cluster: {nodes: four}", 3, "cluster.nodes", ['value "four"', "whole number"]),
        ("cluster: {nodes: 14-}", 3, "cluster.nodes", ['value "14-"', "as in 16 or 14-16"]),
        ("cluster: {nodes: 14..16}", 3, "cluster.nodes", ['value "14..16"', "as in 16 or 14-16"]),
        ("cluster: {nodes: 14-16:2}", 3, "cluster.nodes", ['value "14-16:2"', "16 or 14-16"]),
        ("cluster: {nodes: 16-14}", 3, "cluster.nodes", ['"16-14"', "least first", "write 14-16"]),
        ("cluster: {nodes: 0-4}", 3, "cluster.nodes", ['"0-4"', "within 1", "raise the least"]),
        ("cluster: {nodes: 4-100001}", 3, "cluster.nodes", ["100000", "lower the most"]),
        ("cluster: {nodes: -2}", 3, "cluster.nodes", ["value -2", "at least 1", "raise it"]),
        ("cluster: {nodes: [2, 4]}", 3, "cluster.nodes", ["value [2, 4]", "such as `14-16`"]),
        ("cluster: {nodes: yes}", 3, "cluster.nodes", ["value true", "truth value"]),
        ("cluster: {nodes: 010}", 3, "cluster.nodes", ["value 010 is 8", "plain digits"]),
        ("train: {steps: 0x28}", 3, "train.steps", ["value 0x28 is 40", "plain digits"]),
        ("cluster: {time_limit_min: 1:00:00}", 3, "cluster.time_limit_min", ["is 3600"]),
        ("retry: {backoff_s: 1:30.5}", 3, "retry.backoff_s", ["value 1:30.5 is 90.5"]),
        ("train: {steps: true}", 3, "train.steps", ["value true", "truth value", "a number"]),
        ("train: {checkpoint: {buffers: on}}", 3, "train.checkpoint.buffers", ["true; must be 1"]),
        ("retry: {backoff_s: off}", 3, "retry.backoff_s", ["value false", "truth value"]),
        ("smoke: {rungs: [yes, 2]}", 3, "smoke.rungs[0]", ["value true", "truth value"]),
        ("smoke: {rungs: yes}", 3, "smoke.rungs", ["value true", "must be a list"]),
        ("cluster: {env: {C: true}}", 3, "cluster.env.C", ["value true", "must be text"]),
        ("cluster: yes", 3, "cluster", ["value true", "block of keys"]),
        ("cluster: {kind: slrm}", 3, "cluster.kind", ["'local' or 'slurm'", "mean `slurm`"]),
        ("cluster:\n  nods: 3", 4, "cluster.nods", ["unknown key", "did you mean `nodes`"]),
        (
            "cluster: {steps: 3}",
            3,
            "cluster.steps",
            ["belongs at", "`smoke.steps` or `train.steps`"],
        ),
        ("zebra: 1", 3, "zebra", ["unknown key", "the keys here are cluster, command, data"]),
        ("train: {model: {dmi: 4}}", 3, "train.model.dmi", ["did you mean `dim`"]),
        ("cluster: 7", 3, "cluster", ["value 7", "block of keys"]),
        ("cluster: {setup: echo}", 3, "cluster.setup", ['value "echo"', "must be a list"]),
        ("cluster: {env: {A: 3}}", 3, "cluster.env.A", ["value 3", "must be text", "quotes"]),
        ("cluster: {env: {1A: b}}", 3, "cluster.env.1A", ["must match"]),
        ("cluster: {env: {MY_TOKEN: b}}", 3, "cluster.env", ["looks like a secret"]),
        ("cluster: {exclude: [a, b c]}", 3, "cluster.exclude[1]", ['value "b c"']),
        ("cluster: {memory_per_node: 4}", 3, "cluster.memory_per_node", ["must be text"]),
        ("store: {aws: maybe}", 3, "store.aws", ["true or false"]),
        ("store: {bucket: x}", 3, "store.bucket", ["at least 3 characters", "lengthen it"]),
        ("store: {prefix: /x/}", 3, "store.prefix", ["'/x/'", "write 'x'"]),
        ("store: {prefix: a/../b}", 3, "store.prefix", ["'a/../b'", "'..'", "remove it"]),
        ("store: {bucket: My_Data}", 3, "store.bucket", ["'My_Data'", "lower-case", "rename"]),
        ("store: {bucket: data.}", 3, "store.bucket", ["'data.'", "begin and end", "rename"]),
        ("store: {endpoint_url: s3.x:90}", 3, "store.endpoint_url", ["'s3.x:90'", "http://"]),
        ("store: {endpoint_url: 'http://'}", 3, "store.endpoint_url", ["'http://'", "a host"]),
        ("store: {endpoint_url: 'http://h:99999'}", 3, "store.endpoint_url", ["65535"]),
        ("store: {endpoint_url: 'http://k:s@h'}", 3, "store.endpoint_url", ["no credentials"]),
        ("store: {embedded: {directory: ''}}", 3, "store.embedded.directory", ["white space"]),
        ("workdir: ' '", 3, "workdir", ["value ' '", "'.' for the working directory"]),
        ("train: {steps: 1000000001}", 3, "train.steps", ["at most 1000000000", "lower it"]),
        ("train: {sequence: 16777217}", 3, "train.sequence", ["at most 16777216"]),
        ("train: {global_batch: 16777220}", 3, "train.global_batch", ["at most 16777216"]),
        ("train: {micro_batch: 16777217}", 3, "train.micro_batch", ["at most 16777216"]),
        ("smoke: {rungs: []}", 3, "smoke.rungs", ["at least 1 item"]),
        ("smoke: {rungs: [4, 2]}", 3, "smoke.rungs", ["[4, 2]", "must be positive and grow"]),
        ("retention: {keep: {last: 1}}", 3, "retention.keep.last", ["value 1", "at least 2"]),
        ("retry: {backoff_s: .inf}", 3, "retry.backoff_s", ["finite number"]),
        ("train: {schedule: {peak_lr: .nan}}", 3, "train.schedule.peak_lr", ["finite"]),
        ("train: {schedule: {min_ratio: 2}}", 3, "train.schedule.min_ratio", ["at most 1"]),
        ("train:\n  steps: 5\n  model: {heads: 3}", 5, "train.model.heads", ["heads 3"]),
        (
            "cluster: {nodes: 8}\ntrain: {global_batch: 7}",
            4,
            "train.global_batch",
            ["7 must be at least the 8 ranks", "raise it"],
        ),
        ("cluster: {nodes: 2-65}", 3, "cluster.nodes", ["global_batch 64", "the 65 ranks"]),
        ("cluster: {nodes: 2-4}\nsmoke: {rungs: [1, 5]}", 4, "smoke.rungs", ["beyond", "2-4"]),
        ("run: b", 3, "run", ["given twice, first in line 1", "keep one"]),
        ("train:\n  steps: ${NOT_SET}", 4, "train.steps", ["no variable NOT_SET", "set it"]),
        ("workdir: ${}", 3, "workdir", ["names no variable", "`${NAME}`"]),
        ("workdir: !!python/object:os.system x", 3, "workdir", ["cannot be read"]),
        ("workdir: 2020-13-45", 3, "workdir", ["cannot be read", "quote it"]),
        ("<<: {a: 1}", 3, "spec", ["only plain keys"]),
        ("? [a, b]\n: 1", 3, "spec", ["only plain keys"]),
        ("cluster: &c\n  env: *c", 4, "cluster.env", ["refers to itself"]),
    ],
)
def test_a_mistake_is_told_with_line_field_bound_and_remedy(
    write, text: str, line: int, field: str, parts: list[str]
) -> None:
    (message,) = told(write(LEAST + text))
    assert message.startswith(f"{line}: {field}: "), message
    for part in parts:
        assert part in message


def test_numbers_in_plain_digits_are_read_as_they_look(write) -> None:
    text = "train: {steps: 1_000, schedule: {peak_lr: 3.0e-4, min_ratio: .5, warmup_steps: 0}}\n"
    train = load_spec(write(LEAST + text + "retry: {backoff_s: +2.}\n")).train
    assert train.steps == 1000
    schedule = train.schedule
    assert (schedule.peak_lr, schedule.min_ratio, schedule.warmup_steps) == (3e-4, 0.5, 0)


def test_a_blank_input_is_refused_not_taken_as_the_working_directory(write) -> None:
    assert told(write("run: a\ndata: {inputs: [x, '']}\n")) == [
        "2: data.inputs[1]: value ''; must hold at least one character that is no white space; "
        "write '.' for the working directory, or remove it"
    ]


def test_what_headrace_writes_is_no_input(write, tmp_path: Path) -> None:
    """The embedded store's folder holds a secret, and the workdir the logs of the run itself."""
    for name in ("doc.txt", "work/run/node.n1.log", "objects/credentials"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    text = "run: a\nworkdir: work\nstore: {embedded: {directory: objects}}\ndata: {inputs: [%s]}\n"
    spec = load_spec(write(text % "'*.txt', '**/*'"), base=tmp_path)
    for each in (spec, spec.renamed("b").anchored(Path("/elsewhere"))):
        files = freeze_inputs(each.data)
        assert [file.path.name for file in files] == ["doc.txt", "spec.yaml"]
    with pytest.raises(SpecError, match=r"data\.inputs\[0\] .*objects.* keep the documents"):
        freeze_inputs(load_spec(write(text % "objects/cred*"), base=tmp_path).data)


def test_each_of_several_mistakes_is_told_once_in_the_order_of_lines(write) -> None:
    path = write(
        "run: UPPER\n"
        "cluster:\n"
        "  kind: slurm\n"
        "  nodes: 0\n"
        "  nodes: 2\n"
        "  partitoin: gpu\n"
        "data: {format: csv}\n"
        "train: {steps: '${GONE}', seed: -1}\n"
    )
    fields = [re.match(r"(\d+): (\S+):", line).groups() for line in told(path)]
    assert fields == [
        ("1", "run"),
        ("4", "cluster.nodes"),
        ("5", "cluster.nodes"),
        ("6", "cluster.partitoin"),
        ("7", "data.format"),
        ("7", "data.inputs"),
        ("8", "train.seed"),
        ("8", "train.steps"),
    ]


def test_a_missing_field_says_what_it_is_for(write) -> None:
    (message,) = told(write("run: a\n"))
    assert message.startswith("1: data: data is missing: name the documents to train on")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: a\n  data: b\n", "2: YAML: mapping values are not allowed here"),
        ("train: {steps: ${N}}\n", "1: YAML: expected ',' or '}'"),
        ("train: {steps: ${N}}\n", "inside { } and [ ] put a variable in quotes"),
        ("run: [a\n", "YAML: expected ',' or ']'"),
        ("run: 'a\n", "YAML: found unexpected end of stream"),
        ("run: a\n\tdata: b\n", "2: YAML: found character '\\t'"),
        ("run: a\n---\nrun: b\n", "2: YAML: but found another document"),
        ("run: \x00\n", "YAML: special characters are not allowed"),
        ("data: *nowhere\n", "1: YAML: found undefined alias"),
        ("[" * 5000, "YAML: nested too deeply"),
        ("", "spec: the file is empty"),
        ("# only a comment\n", "spec: the file is empty"),
        ("- run: a\n", "1: spec: the file holds a list"),
        ("run\n", "1: spec: the file holds a single value"),
        ("null\n", "1: spec: the file holds a single value"),
        (b"run: a\ndata: \xff\xfe\n", "2: file: byte 0xff is not UTF-8"),
        ("a: " + "x" * 1_000_001, "file: is above 1,000,000 bytes"),
    ],
)
def test_a_file_that_is_no_spec_is_one_line(write, text: str | bytes, expected: str) -> None:
    (message,) = told(write(text))
    assert expected in message


def test_a_file_that_is_not_there_or_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert told(tmp_path / "gone.yaml") == ["file: there is no such file; check the path"]
    assert told(tmp_path) == ["file: is a directory; name the YAML file in it"]
    locked = tmp_path / "locked.yaml"
    locked.write_text(LEAST)
    locked.chmod(0)
    if not os.access(locked, os.R_OK):
        assert "check its permissions" in told(locked)[0]


def test_variables_come_from_the_environment_and_keep_their_types(write) -> None:
    path = write(
        "run: ${NAME}-x\n"
        "cluster: {nodes: '${NODES}', ranks_per_node: 2}\n"
        "data: {inputs: ['${EMPTY:-/d}/a', '$${HOME}/b', '$HOME/c']}\n"
        "store: {aws: true, prefix: '${UNSET:-}'}\n"
        "train: {steps: 1_000, schedule: {peak_lr: 1e-3}}\n"
    )
    spec = load_spec(path, environ={"NAME": "n", "NODES": "4", "EMPTY": ""}, base=Path("/base"))
    assert spec.run == "n-x"
    assert spec.cluster.nodes == 4
    assert spec.data.inputs == ("/d/a", "/base/${HOME}/b", "/base/$HOME/c")
    assert spec.store.prefix == ""
    assert spec.train.steps == 1000
    assert spec.train.schedule.peak_lr == 0.001


def test_an_unquoted_variable_is_resolved_as_what_it_stands_for(write) -> None:
    spec = load_spec(write(LEAST + "cluster:\n  nodes: ${N:-2}\n"), environ={})
    assert spec.cluster.nodes == 2
    assert told(write(LEAST + "cluster:\n  nodes: ${N}\n"), N="some") == [
        '4: cluster.nodes: value "some"; must be a whole number, or the least and the most joined '
        'by a "-"; write it as in 16 or 14-16'
    ]


def test_relative_paths_are_taken_from_the_working_directory(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        "run: a\n"
        "cluster: {python: bin/python, slurm_conf: etc/slurm.conf}\n"
        "store: {credentials_file: keys, embedded: {directory: objects}}\n"
        "data: {inputs: [docs/*.txt, s3://b/c], tokenizer: tok.json, end_of_document: e}\n"
    )
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    spec = load_spec(path)
    assert spec.workdir == here / ".headrace"
    assert spec.cluster.python == here / "bin/python"
    assert spec.cluster.slurm_conf == here / "etc/slurm.conf"
    assert spec.store.credentials_file == here / "keys"
    assert spec.store.embedded.directory == here / "objects"
    assert spec.data.inputs == (f"{here}/docs/*.txt", "s3://b/c")
    assert spec.data.tokenizer == f"{here}/tok.json"
    assert spec.anchored(Path("/elsewhere")) == spec


@pytest.mark.parametrize("name", ["tiny", "slurm-dev", "llama-8b-64xh100"])
def test_the_example_specs_load(name: str) -> None:
    root = Path(__file__).resolve().parents[2]
    spec = load_spec(root / "pipelines" / f"{name}.yaml", environ={})
    assert spec.run == name or name.startswith(spec.run)
