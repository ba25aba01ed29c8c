"""The stages in their order: what each is given from the spec and from those before it.

No Prefect here: this is what every flow runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flows.spec import PipelineSpec
from storage.errors import SpecError
from storage.records import Stage, StageRecord
from storage.shards.build import plan_shards
from storage.shards.tokenizers import open_tokenizer
from tasks.command import run_command
from tasks.context import RunContext
from tasks.failures import leaving_word
from tasks.prune import prune
from tasks.shard import shard
from tasks.smoke import smoke
from tasks.train import train
from tasks.validate import validate
from trainer.plan.arithmetic import RunSums, run_sums

Records = Mapping[Stage, StageRecord]


def require_files(spec: PipelineSpec) -> None:
    """Find out what only the files that the spec names can tell, before a job is queued.

    Raises:
        SpecError: no file matches an input, or a tokenizer or a model does not fit.
    """
    if spec.command is None:
        plan_shards(spec.documents)
        sums_of(spec)


def sums_of(spec: PipelineSpec) -> tuple[RunSums, ...]:
    """The sums of the run's training, with the vocabulary of its tokenizer.

    They are one's for a number of nodes, and those of the least and the most for a range.

    Raises:
        SpecError: the tokenizer cannot be used, or the model does not fit it.
    """
    vocab = open_tokenizer(spec.documents).vocab
    cluster = spec.cluster
    return tuple(
        run_sums(spec.train, tokenizer_vocab=vocab, world_size=nodes * cluster.ranks_per_node)
        for nodes in dict.fromkeys((cluster.least_nodes, cluster.most_nodes))
    )


def run_stages(
    context: RunContext,
    spec: PipelineSpec,
    stages: Sequence[Stage],
    *,
    done: dict[Stage, StageRecord] | None = None,
) -> Records:
    """Run `stages` one after the other, or skip those that are finished already.

    What is in `done` is finished whatever has changed since, and what gets finished is added to it:
    so a request that many processes serve goes through each stage once, as in one process.

    Raises:
        SpecError: what the spec says of files does not fit them; nothing is begun.
        StageFailed: one ended without its result; those after it are not begun.
        RunCancelled: a person ended the run.
        Paused: the engine was to leave.
    """
    done = {} if done is None else done
    stages = [stage for stage in stages if stage in spec.stages]
    if not stages:
        raise SpecError(
            f"command: a run of a script of your own has the stages {', '.join(spec.stages)} alone"
        )
    if Stage.SHARD in stages and Stage.SHARD not in done:
        require_files(spec)
    for stage in stages:
        if stage not in done:
            placed = context if stage is Stage.VALIDATE else without_unfit(context)
            with leaving_word(context, stage):
                done[stage] = _run(placed, spec, stage, done)
    return done


def without_unfit(context: RunContext) -> RunContext:
    """The context with the nodes that the last validation found unfit kept out of jobs."""
    verdicts = context.ledger.stage_records(Stage.VALIDATE)
    unfit = verdicts[-1].outputs["unfit"] if verdicts else ()
    return replace(context, unfit_nodes=frozenset(unfit))


def _run(
    context: RunContext, spec: PipelineSpec, stage: Stage, done: Mapping[Stage, StageRecord]
) -> StageRecord:
    match stage:
        case Stage.VALIDATE:
            return validate(context, spec.validation)
        case Stage.SHARD:
            return shard(context, spec.documents)
        case Stage.SMOKE:
            manifest_key = done[Stage.SHARD].outputs["manifest_key"]
            return smoke(context, spec.smoke, train=spec.train, manifest_key=manifest_key)
        case Stage.TRAIN if spec.command is not None:
            return run_command(context, spec.command)
        case Stage.TRAIN:
            manifest_key = done[Stage.SHARD].outputs["manifest_key"]
            return train(context, spec.train, manifest_key=manifest_key)
        case Stage.PRUNE:
            return prune(context, spec.retention)
