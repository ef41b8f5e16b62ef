"""GGUF models: the weights, text and tokens of the same model as safetensors, or a refusal."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Regex
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import TikTokenConverter

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.gguf_blocks import KINDS
from foredraft.models.files.gguf_checkpoint import write_checkpoint
from foredraft.models.files.progress import SilentProgress
from foredraft.models.files.schema import ENDS_BY_TEXT, GgufTokenizerFields
from foredraft.models.files.store import resolve_model
from foredraft.models.native.source_blocks import stacked_blocks
from foredraft.models.text.tokenizer import Tokenizer
from tests.models.checkpoints import CHAT_TEMPLATE
from tests.models.gguf_files import (
    ARRAY,
    CODES,
    STRING,
    Stored,
    Typed,
    metadata_of,
    shape_of,
    tensors_of,
    write_gguf,
)
from tests.models.progress import RecordedProgress


def converted(
    folder: Path, config: LlamaConfig, kind: str = "F32", **metadata: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    stored, weights = tensors_of(config, kind)
    path = write_gguf(folder / "model.gguf", metadata_of(config, **metadata), stored)
    into = folder / "converted"
    into.mkdir()
    write_checkpoint(path, into, SilentProgress())
    quantised = KINDS[CODES[kind]].unpack is not None
    return into, {
        name: tensor.bfloat16().float() if quantised and tensor.ndim == 2 else tensor
        for name, tensor in weights.items()
    }


# ---------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("kind", CODES)
def test_weights_and_logits_are_those_of_the_same_model(tmp_path: Path, kind: str) -> None:
    config = shape_of(tie_word_embeddings=kind in ("Q8_0", "F16"))
    directory, weights = converted(tmp_path, config, kind)
    found = load_file(directory / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name].float(), tensor), name
    assert len({path.stat().st_mode for path in directory.iterdir()}) == 1, "one is as readable"
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    loaded = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_blocks_of_four_bits_are_taken_as_they_come(tmp_path: Path, kind: str) -> None:
    config = shape_of()
    directory, weights = converted(tmp_path, config, kind)
    stored = dict(tensors_of(config, kind)[0])
    prefix = "model.layers.1.self_attn."
    names = [f"{prefix}{part}_proj.weight" for part in "qkv"]
    blocks = stacked_blocks(directory, names, torch.cat([weights[name] for name in names]))
    assert blocks is not None
    rows = np.frombuffer(stored["blk.1.attn_v.weight"].content, np.uint8).reshape(128, -1)
    exact = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert torch.equal(blocks.dequantised()[-128:], torch.from_numpy(exact))


def test_linear_scaling_and_heads_of_their_own_size_are_kept(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1234.0, "factor": 2.5}
    config = shape_of(head_dim=32, rope_parameters=rope)
    more = {
        "llama__attention__key_length": 32,
        "llama__attention__value_length": 32,
        "llama__rope__scaling__type": "linear",
        "llama__rope__scaling__factor": 2.5,
    }
    directory, weights = converted(tmp_path, config, **more)
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(weights)
    loaded = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def llama3_gguf(folder: Path, config: LlamaConfig, **changes: Any) -> Path:
    """A file with the factors by which transformers divides the frequencies of ``LLAMA_3``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 64, 2).float() / 64)
    factors = (plain / scaled).numpy()
    for place, value in changes.items():
        factors[int(place[1:])] = value
    stored, _ = tensors_of(config, "BF16")
    stored.append(("rope_freqs.weight", Stored(0, (32,), factors.astype("<f4").tobytes())))
    metadata = metadata_of(config) | {"llama.rope.freq_base": 500000.0}
    return write_gguf(folder / "llama3.gguf", metadata, stored)


def test_llama_3_is_known_by_its_factors(tmp_path: Path) -> None:
    config = shape_of(rope_parameters=LLAMA_3, max_position_embeddings=16384)
    write_checkpoint(llama3_gguf(tmp_path, config), tmp_path, SilentProgress())
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.rope_parameters == LLAMA_3
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(tensors_of(config, "BF16")[1])
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("changes", [{"_20": 3.0}, {"_31": float("nan")}, {"_0": -1.0}])
def test_other_factors_are_refused(tmp_path: Path, changes: dict[str, float]) -> None:
    path = llama3_gguf(tmp_path, shape_of(rope_parameters=LLAMA_3), **changes)
    with pytest.raises(ModelLoadError, match="are not Llama 3's"):
        write_checkpoint(path, tmp_path, SilentProgress())


# --------------------------------------------------------------------------------------- tokenizer

SPLIT_TEXT = "\n\n1234 I'll go."
SPLITS = {
    "smollm": ["ĊĊ", "1", "2", "3", "4", "ĠI", "'ll", "Ġgo", "."],
    "gpt-2": ["Ċ", "Ċ", "1234", "ĠI", "'ll", "Ġgo", "."],
    "llama-bpe": ["ĊĊ", "123", "4", "ĠI", "'ll", "Ġgo", "."],
    "qwen2": ["ĊĊ", "1", "2", "3", "4", "ĠI", "'ll", "Ġgo", "."],
    "refact": ["ĊĊ", "1", "2", "3", "4", "ĠI", "'ll", "Ġgo", "."],
    "dbrx": ["ĊĊ", "123", "4", "ĠI", "'ll", "Ġgo", "."],
    "gpt-4o": ["ĊĊ", "123", "4", "ĠI'll", "Ġgo", "."],
}


def tokenizer_of(folder: Path, **metadata: Any) -> Tokenizer:
    directory, _ = converted(folder, shape_of(), **metadata)
    return Tokenizer(directory)


@pytest.mark.parametrize("name", SPLITS)
def test_a_text_comes_back_and_special_tokens_are_single(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_of(
        tmp_path, tokenizer__ggml__pre=name, tokenizer__ggml__add_bos_token=False
    )
    text = "\n\n1234 I'll go, naïve café 東京\t<|im_end|> x"
    ids = tokenizer.encode(text)
    assert 2 in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    fast = FastTokenizer.from_str(tokenizer.definition)
    pieces = [piece for piece, _ in fast.pre_tokenizer.pre_tokenize_str(SPLIT_TEXT)]
    assert pieces == SPLITS[name]
    assert tokenizer.eos_token_ids == (0, 2), "<|endoftext|> and <|im_end|>"
    assert tokenizer.chat_template == CHAT_TEMPLATE


ODD_TEXTS = (
    *("I'LL go\r\n\n  to  12345 places ", "x=1;\n\ty", "½ ２３ é́ العربية 🙂🙂"),
    "don't HTTPServer naïveÉcole",
)


@pytest.mark.parametrize("kind_of_pads", [5, 1])
def test_names_behind_the_last_token_are_left_out(tmp_path: Path, kind_of_pads: int) -> None:
    """Files have as many names as their model has rows; what a file itself names stays."""
    usual = metadata_of(shape_of())
    tokens = [*usual["tokenizer.ggml.tokens"], *(f"[PAD{i}]" for i in range(300, 304))]
    kinds = [*usual["tokenizer.ggml.token_type"], *[kind_of_pads] * 4]
    for more, kept, padding in (([], 300, 2), (["word", "ending", "rest"], 306, 305)):
        names = {"tokens": [*tokens, *more], "token_type": [*kinds, *[1, 5, 5][: len(more)]]}
        (folder := tmp_path / str(kept)).mkdir()
        directory, _ = converted(
            folder,
            shape_of(vocab_size=304 + len(more)),
            **{f"tokenizer__ggml__{name}": each for name, each in names.items()},
            tokenizer__ggml__padding_token_id=padding,
        )
        tokenizer = Tokenizer(directory)
        assert tokenizer.vocab_size == tokenizer.num_ids(400) == kept
        assert (tokenizer.id_of("[PAD300]") == 300) is bool(more)


@pytest.mark.parametrize(
    ("pre", "name"),
    [
        ("qwen2", "Qwen2Tokenizer"),
        ("qwen35", "Qwen3_5Tokenizer"),
        ("command-r", "CohereTokenizer"),
        ("mpt", "GPTNeoXTokenizer"),
    ],
)
def test_texts_are_split_as_transformers_splits_them(tmp_path: Path, pre: str, name: str) -> None:
    theirs = getattr(transformers, name)(vocab={"a": 0}, merges=[]).backend_tokenizer
    tokenizer = tokenizer_of(tmp_path, tokenizer__ggml__pre=pre)
    ours = FastTokenizer.from_str(tokenizer.definition)
    for text in (*ODD_TEXTS, "e\u0301te\u0301 \u0928\u092e\u0938\u094d\u0924\u0947\u0964"):
        assert ours.normalizer.normalize_str(text) == theirs.normalizer.normalize_str(text)
        found = ours.pre_tokenizer.pre_tokenize_str(text)
        assert found == theirs.pre_tokenizer.pre_tokenize_str(text)


def test_llama_3_is_split_as_transformers_splits_it(tmp_path: Path) -> None:
    pattern = inspect.signature(TikTokenConverter).parameters["pattern"].default
    parts = [Split(Regex(pattern), "isolated"), ByteLevel(False, use_regex=False)]
    theirs = Sequence(parts)
    tokenizer = tokenizer_of(tmp_path, tokenizer__ggml__pre="llama-bpe")
    ours = FastTokenizer.from_str(tokenizer.definition)
    for text in ODD_TEXTS:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_a_start_token_is_added_where_the_model_has_it(
    tmp_path: Path, pre: str, said: bool | None, adds: bool
) -> None:
    more = {} if said is None else {"tokenizer__ggml__add_bos_token": said}
    ids = tokenizer_of(tmp_path, tokenizer__ggml__pre=pre, **more).encode("a")
    assert (ids[0] == 0) is adds
    assert ids.count(0) == adds


def test_sampling_defaults_of_a_file(tmp_path: Path) -> None:
    said = {"general__sampling__temp": 0.5, "general__sampling__top_k": 7}
    assert tokenizer_of(tmp_path, **said).sampling_defaults == {"temperature": 0.5, "top_k": 7}


HARMONY = ["<|end|>", "<|return|>", "<|call|>"]
"""The first ends a part of a reply, and not the reply."""


@pytest.mark.parametrize(
    ("tokens", "end"),
    [*((["a", "<end>", text], 1) for text in sorted(ENDS_BY_TEXT)), (HARMONY, None)],
)
def test_tokens_that_end_a_reply_are_known_by_their_text(tokens: list[str], end: Any) -> None:
    """Phi-3, Gemma 2 and early Llama 3 files name the end of a text alone."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3,
        "tokenizer.ggml.eos_token_id": end,
    }
    assert GgufTokenizerFields.model_validate(metadata).end_ids() == [1, 2]


@pytest.mark.parametrize(
    ("name", "like"),
    [
        *(("deepseek-r1-qwen", "qwen2"), ("llama3", "llama-bpe"), ("glm4", "dbrx")),
        *(("starcoder", "smollm"), ("exaone4", "gpt-2"), ("hunyuan-dense", "deepseek-v3")),
    ],
)
def test_names_of_one_splitting(tmp_path: Path, name: str, like: str) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    one = tokenizer_of(tmp_path / "one", tokenizer__ggml__pre=name)
    other = tokenizer_of(tmp_path / "other", tokenizer__ggml__pre=like)
    assert one.definition == other.definition


LISTED = (
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-"
    "Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ"
    "-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ"
    "-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]"
)
"""Letters of DeepSeek LLM's words, as published."""
PUBLISHED: dict[str, list[str]] = {
    "deepseek-llm": [
        *(r"[\r\n]", rf"\s?{LISTED}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$"),
        *("[一-龥\u0800-一가-\ud7ff]+", r"\p{N}+"),
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "seed-coder": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        *(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+"),
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek-coder": [
        *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}"),
    ],
}
"""Expressions of ``tokenizer.json``: Mistral Nemo, Seed-Coder, DeepSeek LLM, V3 and Coder."""


CASED = " ".join(map(chr, (*range(0x100, 0x2000, 3), *range(0xA700, 0xAC00, 2), 0x10571, 0x1D401)))


@pytest.mark.parametrize("pre", PUBLISHED)
def test_texts_are_split_as_published(tmp_path: Path, pre: str) -> None:
    splits = [Split(Regex(pattern), "isolated") for pattern in PUBLISHED[pre]]
    theirs = Sequence([*splits, ByteLevel(False, use_regex=False)])
    tokenizer = tokenizer_of(tmp_path, tokenizer__ggml__pre=pre)
    ours = FastTokenizer.from_str(tokenizer.definition)
    for text in (
        *ODD_TEXTS,
        "don't HTTPServer naïveÉcole",
        "1\u093eZ \u0301\u0301A",  # marks in front of a capital
        "東京タワーは\n_x[0]).y();\r\n 한국",
        CASED,
    ):
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
    if pre == "tekken":
        assert tokenizer.encode("a")[0] == 0, "a start token"


@pytest.mark.parametrize(
    ("key", "value", "is_refused"),
    [
        ("suppress_tokens", [3], False),
        ("escape_whitespaces", True, True),
        ("add_sep_token", False, False),
        ("fim_pre_token_id", 3, False),
        ("token_type_count", 2, False),
    ],
)
def test_what_is_not_known_of_a_tokenizer_is_refused(
    tmp_path: Path, key: str, value: Any, is_refused: bool
) -> None:
    if is_refused:
        with pytest.raises(ModelLoadError, match=f"{key}.*not implemented"):
            tokenizer_of(tmp_path, **{f"tokenizer__ggml__{key}": value})
    else:
        tokenizer_of(tmp_path, **{f"tokenizer__ggml__{key}": value})


# ---------------------------------------------------------------------------------------- refusals

CHANGES: dict[str, tuple[Mapping[str, Any], str]] = {
    "another family": ({"general.architecture": "mamba"}, "family 'mamba' are not read"),
    "a part": ({"split.count": Typed(2, 3)}, "part 0 .from 0. of 3, and is named as part 0 of 1"),
    "an unknown key": ({"llama.logit_scale": 2.0}, "'llama.logit_scale' asks for"),
    "a scaling": ({"llama.rope.scaling.type": "su"}, "llama.rope.scaling.type is 'su'"),
    "no factors": ({"llama.rope.scaling.type": "longrope"}, r"'longrope' with the tensors \[\]"),
    "heads by layer": (
        {"llama.attention.head_count_kv": Typed(ARRAY, [2, 2], 4)},
        "head_count_kv is array",
    ),
    "a partly rotated head": ({"llama.rope.dimension_count": 32}, "rotated parts differ"),
    "many layers": ({"llama.block_count": 2**31 - 1}, "too few for its number of layers"),
    "a layer more": ({"llama.block_count": 3}, "'blk.2.attn_k.weight' is missing"),
    "a width": ({"llama.feed_forward_length": 512}, r"has shape \(256, 256\), not \(512, 256\)"),
    "heads that do not fit": ({"llama.attention.head_count": 3}, "no multiple of"),
    "no merges": ({"tokenizer.ggml.merges": Typed(ARRAY, [], STRING)}, "it has no merges"),
    "a splitting": ({"tokenizer.ggml.pre": "bloom"}, "'bloom' splits text is not"),
    "a special id": ({"tokenizer.ggml.eos_token_id": 300}, "outside of the vocabulary"),
    "merges": ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer is damaged"),
    "tokens twice": ({"tokenizer.ggml.tokens": ["a"] * 300}, "a token is there twice"),
    "a long token": (
        {"tokenizer.ggml.tokens": ["a" * 2000, *map(chr, range(400, 699))]},
        "is too long",
    ),
    "few tokens": ({"tokenizer.ggml.tokens": ["a", "b"]}, r"has shape \(300, 256\), not \(2, 256"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, change: str) -> None:
    changes, message = CHANGES[change]
    config = shape_of()
    stored, _ = tensors_of(config, "Q8_0")
    path = write_gguf(tmp_path / "model.gguf", metadata_of(config) | {**changes}, stored)
    with pytest.raises(ModelLoadError, match=message) as refused:
        write_checkpoint(path, tmp_path, SilentProgress())
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("attn_q", r"'blk\.0\.attn_k\.bias' is missing"),
        ("ffn_up", r"'blk\.0\.ffn_up\.bias' belongs to a feature"),
    ],
)
def test_single_biases_are_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    config = shape_of()
    stored, _ = tensors_of(config, "Q8_0")
    stored.append((f"blk.0.{name}.bias", Stored(0, (256,), bytes(1024))))
    path = write_gguf(tmp_path / "model.gguf", metadata_of(config), stored)
    with pytest.raises(ModelLoadError, match=message):
        write_checkpoint(path, tmp_path, SilentProgress())


# ---------------------------------------------------------------------------------------- by name


def test_a_file_is_converted_once_and_again_when_it_has_changed(
    tmp_path: Path, cache: Path
) -> None:
    config = shape_of()
    stored, _ = tensors_of(config, "Q4_1")
    folder = tmp_path / "folder with one"
    folder.mkdir()
    path = write_gguf(folder / "My model.Q4_1.GGUF", metadata_of(config), stored)
    progress = RecordedProgress()
    directory = resolve_model(path, progress=progress)
    assert directory.parent == cache / "models"
    assert progress.fractions[-1] == 1.0
    again = RecordedProgress()
    assert resolve_model(folder, progress=again) == directory
    assert again.fractions == []
    write_gguf(path, metadata_of(config, llama__context_length=99), stored)
    assert resolve_model(path, progress=again) == directory
    assert '"max_position_embeddings": 99' in (directory / "config.json").read_text()
