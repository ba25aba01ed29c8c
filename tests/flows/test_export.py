"""What `headrace checkpoints export` writes is, to `transformers` too, the trained model."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

# Before `transformers` is imported, which reads them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from flows.exporting import export
from storage.checkpoint_records import Commit
from storage.checkpoints.catalog import gather
from storage.checkpoints.contents import DamagedContentsError, read_layout
from storage.checkpoints.export import INDEX_NAME, FloatType
from storage.checkpoints.quarantine import condemn
from storage.errors import CheckpointError, DataError, HeadraceError, SpecError
from storage.keys import DatasetKeys
from storage.records import Stage, StageRecord, encode, new_nonce
from storage.shards.manifest import TokenizerRecord, assemble
from storage.shards.tokenizers import BYTES, ByteTokenizer, FileTokenizer
from tests.flows.checkpoint_runs import Run, Site, a_site
from trainer.model import Decoder
from trainer.plan.arithmetic import ModelShape
from trainer.spec import ModelSpec, OptimizerSpec, TrainSpec
from trainer.state import TrainState
from trainer.weights import initialise

pytestmark = pytest.mark.s3

TEXTS = (
    "A plain sentence, and another.  Two spaces ; a line\n\nand a\ttab.",
    "Zürich, naïve, 漢字かな, привет, 🙂👩‍👩‍👧, \u0000\u00ad\u00a0end",
    " leading and trailing ",
    "<|endoftext|> is text, too",
)
SMALL = ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=77, rope_theta=5e3, norm_eps=1e-4)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with a_site(tmp_path_factory.mktemp("export")) as site:
        yield site


@pytest.fixture(scope="module")
def small(site: Site) -> Trained:
    return train(site, SMALL)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run with one checkpoint, and the model that is in it."""

    run: Run
    spec: TrainSpec
    model: Decoder
    commit: Commit


def train(site: Site, model: ModelSpec, *, tokenizer: Path | None = None) -> Trained:
    """A run of which one checkpoint is there, of weights that are as good as trained."""
    run = site.run(begun=False)
    spec = TrainSpec(model=model, sequence=24)
    known = (
        ByteTokenizer() if tokenizer is None else FileTokenizer(tokenizer, end_of_document="</s>")
    )
    data = {"tokenizer": BYTES if tokenizer is None else str(tokenizer)}
    run.begin({"train": spec.model_dump(mode="json"), "data": data})
    manifest = assemble(
        [],
        tokenizer=TokenizerRecord(
            name=known.name,
            digest=known.digest,
            vocab=known.vocab,
            end_of_document=known.end_of_document,
        ),
    )
    key = DatasetKeys(prefix=run.store.prefix, build=new_nonce()).manifest
    run.ledger.store.put(key, encode(manifest))
    decoder = make_decoder(spec, vocab=known.vocab)
    state = TrainState(decoder, OptimizerSpec()).tensors()
    order = {"data_order": {"seed": 0, "sequence": spec.sequence}}
    # `work.save_state` calls its data set "data".
    run.ledger.claim_stage(
        StageRecord(
            stage=Stage.SHARD,
            fingerprint="f",
            generation=0,
            outputs={"dataset_id": "data", "manifest_key": key},
            attempts=(1,),
            nonce=new_nonce(),
            at=datetime.now(UTC),
        )
    )
    commit = run.save(run.attempt(1), 100, {**state, **order})
    return Trained(run=run, spec=spec, model=decoder, commit=commit)


def make_decoder(spec: TrainSpec, *, vocab: int) -> Decoder:
    shape = ModelShape.resolve(spec.model, tokenizer_vocab=vocab)
    decoder = Decoder(
        shape,
        sequence=spec.sequence,
        rope_theta=spec.model.rope_theta,
        norm_eps=spec.model.norm_eps,
    )
    initialise(decoder, seed=1)
    with torch.no_grad():
        # As first drawn, attention is nearly even and norms are ones: nothing would be compared.
        for number, parameter in enumerate(decoder.parameters()):
            noise = torch.Generator().manual_seed(number)
            parameter.mul_(3).add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return decoder


def write(
    trained: Trained, folder: Path, *, dtype: FloatType = "float32", file_bytes: int = 10**9
) -> tuple[str, ...]:
    record = trained.run.ledger.run_record()
    assert record is not None
    return export(
        trained.run.ledger,
        record,
        trained.commit,
        folder,
        dtype=dtype,
        tokenizer=None,
        began=lambda total: None,
        told=lambda size: None,
        file_bytes=file_bytes,
    ).files


def load(folder: Path) -> Any:
    """The model as `transformers` reads it, every weight of which was in the files."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def difference(trained: Trained, loaded: Any) -> float:
    shape = trained.model.shape
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocab, (3, trained.spec.sequence), generator=noise)
    with torch.no_grad():
        ours, theirs = trained.model(tokens), loaded(tokens).logits
    assert ours.std() > 0.5
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize(
    ("model", "file_bytes"),
    [
        (SMALL, 10**9),
        (ModelSpec(dim=24, layers=1, heads=2, ffn_dim=9, vocab=300), 20_000),
        (ModelSpec(dim=16, layers=3, heads=4, kv_heads=1, norm_eps=1e-2), 30_000),
    ],
    ids=["gqa-odd-ffn-padded-vocab", "full-attention-in-files", "one-kv-head-in-files"],
)
def test_transformers_computes_the_same_logits(
    site: Site, tmp_path: Path, model: ModelSpec, file_bytes: int
) -> None:
    trained = train(site, model)
    files = write(trained, tmp_path / "out", file_bytes=file_bytes)
    assert (INDEX_NAME in files) == (file_bytes < 10**9)
    assert difference(trained, load(tmp_path / "out")) < 2e-5


def test_the_command_writes_a_folder_and_says_how_to_load_it(
    small: Trained, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    told = small.run.told("export", "100", "-o", str(folder), "--dtype", "bfloat16")
    assert f"AutoModelForCausalLM.from_pretrained({str(folder)!r})" in told
    for path in folder.iterdir():
        assert str(path) in told
    loaded = load(folder)
    assert loaded.dtype == torch.bfloat16
    ours = dict(small.model.named_parameters())
    for theirs, name in (
        ("model.layers.1.self_attn.k_proj.weight", "blocks.1.attention.key.weight"),
        ("lm_head.weight", "head.weight"),
    ):
        assert torch.equal(loaded.get_parameter(theirs), ours[name].bfloat16())
    assert list(tmp_path.iterdir()) == [folder]


def test_the_bytes_tokenizer_means_the_same_there(small: Trained, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write(small, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text, ids in zip(TEXTS, ByteTokenizer().encode(TEXTS), strict=True):
        assert theirs(text)["input_ids"] == ids.tolist()
        assert theirs.decode(ids.tolist()) == text
    assert theirs.eos_token_id == ByteTokenizer.end_of_document
    assert theirs.decode([104, 256], skip_special_tokens=True) == "h"


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts a token before each text, and that would cut texts short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_is_copied_if_it_is_the_one_that_made_the_data(
    site: Site, tokenizer_file: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    kept = tmp_path / "tokenizer.json"
    kept.write_bytes(tokenizer_file.read_bytes())
    trained = train(site, SMALL, tokenizer=kept)
    told = trained.run.told("export", "-o", str(tmp_path / "out"))
    assert "add_special_tokens=False" in told
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = FileTokenizer(kept, end_of_document="</s>")
    for text, ids in zip(TEXTS[:3], ours.encode(TEXTS[:3]), strict=True):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids.tolist()
    assert theirs.eos_token_id == ours.end_of_document
    kept.write_text(kept.read_text() + " ")
    with pytest.raises(DataError, match="has changed since"):
        write(trained, tmp_path / "other")
    kept.unlink()
    with pytest.raises(DataError, match=r"cannot be read: No such file.*--tokenizer"):
        write(trained, tmp_path / "other")
    trained.run.told("export", "-o", str(tmp_path / "other"), "--tokenizer", str(tokenizer_file))


def test_a_damaged_or_swept_checkpoint_leaves_no_folder(site: Site, tmp_path: Path) -> None:
    trained = train(site, SMALL)
    store = trained.run.ledger.store
    layout = read_layout(store, trained.commit)
    chunk = layout.tensors["model.blocks.1.attention.key.weight"].chunks[0]
    file = next(one for one in trained.commit.files if one.key.endswith(chunk.file))
    body = bytearray(store.get(file.key))
    body[chunk.start + 40] ^= 1
    store.put(file.key, bytes(body))
    with pytest.raises(DamagedContentsError, match=r"tensor 'model\.blocks\.1\.attention\.key"):
        write(trained, tmp_path / "out")
    store.delete([file.key])
    with pytest.raises(DamagedContentsError, match="is gone"):
        write(trained, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert not gather(trained.run.ledger).inventory.markers


def test_whole_weights_of_a_checkpoint_in_quarantine_are_exported_and_that_is_said(
    site: Site, tmp_path: Path
) -> None:
    trained = train(site, SMALL)
    condemn(trained.run.ledger, trained.commit.ref, host="n7", fault="the optimizer is damaged")
    told = trained.run.told("export", "100", "-o", str(tmp_path / "out"))
    assert "in quarantine: a verify on n7 found: the optimizer is damaged" in told
    assert "Every byte that was exported was checked" in told


def test_a_folder_in_use_or_that_cannot_be_made_is_refused(small: Trained, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(SpecError, match=r"must be a new or an empty folder, and holds 1 entry"):
        write(small, tmp_path / "full")
    with pytest.raises(SpecError, match="is a file"):
        write(small, tmp_path / "full" / "mine.txt")
    with pytest.raises(SpecError, match="there is no folder"):
        write(small, tmp_path / "none" / "out")
    with pytest.raises(HeadraceError, match="cannot be written"):
        write(small, Path("/proc/out"))
    (tmp_path / "empty").mkdir()
    write(small, tmp_path / "empty")
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system of 64 KiB")
def test_a_disk_that_is_too_small_is_said_before_anything_is_read(
    small: Trained, tmp_path: Path
) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(HeadraceError, match=r"needs 0\.\d+ GB, and 0\.000 GB are free"):
            write(small, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_what_is_no_model_of_ours_is_refused(site: Site, small: Trained, tmp_path: Path) -> None:
    record = small.run.ledger.run_record()
    assert record is not None

    def refused(kind: type[Exception], match: str, **spec: Any) -> None:
        with pytest.raises(kind, match=match):
            export(
                small.run.ledger,
                replace(record, spec={**record.spec, **spec}),
                small.commit,
                tmp_path / "out",
                dtype="float32",
                tokenizer=None,
                began=lambda total: None,
                told=lambda size: None,
            )

    refused(SpecError, "a script of its own", command={"argv": ["x"]})
    refused(SpecError, "of another version", train={"odd": 1})
    other = small.spec.model_copy(update={"model": ModelSpec(dim=64)})
    refused(CheckpointError, r"must be \[320, 64\]", train=other.model_dump(mode="json"))
    empty = site.run()
    with pytest.raises(SpecError, match="none was committed"):
        empty.ask("export", "-o", str(tmp_path / "out"))


def test_numbers_beyond_float16_are_refused_not_made_infinite(site: Site, tmp_path: Path) -> None:
    run = train(site, SMALL)
    with torch.no_grad():
        run.model.norm.weight[0] = 70_000.0
    state = TrainState(run.model, OptimizerSpec()).tensors()
    large = replace(run, commit=run.run.save(run.run.claim(1), 200, dict(state)))
    with pytest.raises(CheckpointError, match="holds 70000, beyond 65504"):
        write(large, tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == []
    write(large, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.get_tensor("model.norm.weight")[0] == 70_000
        assert json.dumps(file.metadata()).count(run.run.name) == 1
