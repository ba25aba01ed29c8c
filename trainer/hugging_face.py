"""The model and its tokenizer as Hugging Face's `transformers` knows them: names and settings.

The decoder is a Llama: RMSNorm, SwiGLU, grouped queries, and rotary pairs (i, i + half of a head),
so its weights need new names and nothing else. Loads neither torch nor `transformers`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.errors import DataError
from storage.shards.manifest import TokenizerRecord
from storage.shards.tokenizers import BYTES, ByteTokenizer
from trainer.plan.arithmetic import ModelShape
from trainer.spec import TrainSpec

END_OF_DOCUMENT = "<|endoftext|>"
"""What the token 256 of the tokenizer `bytes`, which has no text, is called there."""

_OUTER = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_OF_A_BLOCK = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.gate_proj": "feed_forward.gate",
    "mlp.up_proj": "feed_forward.up",
    "mlp.down_proj": "feed_forward.down",
}


def parameter_names(shape: ModelShape) -> dict[str, str]:
    """Names of `LlamaForCausalLM`, in its order, and those of the same parameters here."""
    blocks = {
        f"model.layers.{number}.{theirs}.weight": f"blocks.{number}.{ours}.weight"
        for number in range(shape.layers)
        for theirs, ours in _OF_A_BLOCK.items()
    }
    embedding, *rest = _OUTER.items()
    return dict([embedding]) | blocks | dict(rest)


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by our names."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    of_a_block = {
        "attention_norm": (shape.dim,),
        "attention.query": (queries, shape.dim),
        "attention.key": (keys, shape.dim),
        "attention.value": (keys, shape.dim),
        "attention.output": (shape.dim, queries),
        "feed_forward_norm": (shape.dim,),
        "feed_forward.gate": (shape.ffn_dim, shape.dim),
        "feed_forward.up": (shape.ffn_dim, shape.dim),
        "feed_forward.down": (shape.dim, shape.ffn_dim),
    }
    blocks = {
        f"blocks.{number}.{name}.weight": size
        for number in range(shape.layers)
        for name, size in of_a_block.items()
    }
    outer = {
        "embedding.weight": (shape.vocab, shape.dim),
        "norm.weight": (shape.dim,),
        "head.weight": (shape.vocab, shape.dim),
    }
    return blocks | outer


def model_config(
    shape: ModelShape, train: TrainSpec, *, end_of_document: int, dtype: str
) -> dict[str, Any]:
    """`config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": train.sequence,
        "rms_norm_eps": train.model.norm_eps,
        # The first is read by transformers 4, the second by 5.
        "rope_theta": train.model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": train.model.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end_of_document,
        "dtype": dtype,
    }


def generation_config(*, end_of_document: int) -> dict[str, Any]:
    """`generation_config.json`: a text ends with the token that ends a document."""
    return {"eos_token_id": end_of_document}


def tokenizer_config(tokenizer: str, record: TokenizerRecord, *, sequence: int) -> dict[str, Any]:
    """`tokenizer_config.json`, for the `tokenizer.json` whose text is given.

    Raises:
        DataError: it does not know the token that ended the documents.
    """
    from tokenizers import Tokenizer

    end = Tokenizer.from_str(tokenizer).id_to_token(record.end_of_document)
    if end is None:
        raise DataError(
            f"the tokenizer {record.name!r} has no token {record.end_of_document}, with which "
            "documents of the data set end; name the file that made the data set with --tokenizer"
        )
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "model_max_length": sequence,
        "clean_up_tokenization_spaces": False,
        # To the tokenizer `bytes` every text is bytes, the name of its one other token, too.
        **({"split_special_tokens": True} if record.name == BYTES else {}),
    }


def bytes_tokenizer() -> str:
    """The text of a `tokenizer.json` that does what `tokenizer: bytes` does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: byte for byte, letter in enumerate(_letters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT, normalized=False)])
    assert tokenizer.token_to_id(END_OF_DOCUMENT) == ByteTokenizer.end_of_document
    return str(tokenizer.to_str(pretty=True))


def file_tokenizer(path: Path, record: TokenizerRecord) -> str:
    """The text of the `tokenizer.json` at `path`, which must be the one that made the data set.

    Raises:
        DataError: it cannot be read, or is another one.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"the tokenizer {str(path)!r} cannot be read: {error.strerror}; name with --tokenizer "
            f"where {record.name!r} is now (its SHA-256 is {record.digest})"
        ) from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != record.digest:
        raise DataError(
            f"the tokenizer {str(path)!r} has SHA-256 {digest}, and the data set was made with one "
            f"of {record.digest}: the file has changed since; name the old one with --tokenizer"
        )
    return content.decode()


def adds_tokens(tokenizer: str) -> bool:
    """Whether a `tokenizer.json` puts tokens around a text that the model has not seen there."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_str(tokenizer)
    bare = loaded.encode("a", add_special_tokens=False).ids
    return bool(loaded.encode("a", add_special_tokens=True).ids != bare)


def to_json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _letters_of_bytes() -> list[str]:
    """The letter by which byte-level tokenizers write each byte: itself where it can be printed,
    else, in order, one from U+0100 on (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = []
    others = 0
    for byte in range(256):
        letters.append(chr(byte) if byte in printable else chr(0x100 + others))
        others += byte not in printable
    return letters
