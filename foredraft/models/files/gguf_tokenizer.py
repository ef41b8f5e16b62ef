"""The tokenizer of a GGUF file, rebuilt as ``tokenizer.json``.

A file of the kind "gpt2" holds the vocabulary and the merges. How text is split before it is merged
is only named, so the names that are known are spelled out here, and others are refused: a text that
is split otherwise becomes other tokens than the model was trained on. A file of the kind "llama"
(sentencepiece) holds a score for each token instead, and splits nothing. One of the kind "gemma4"
has merges, and splits nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from foredraft.models.files.schema import GgufTokenizerFields

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
"""Types of tokens, as llama.cpp numbers them."""
_SPACE = "\u2581"
"""Sentencepiece's character for a space."""
# Words, runs of digits, signs and white space, as the models' authors split them.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same with a capital letter beginning a word, and letters after an apostrophe joined to it.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FRONT = r"[^\r\n\p{L}\p{N}]?"  # a mark may be of any part, so all of the first comes before
_CASED = f"{_FRONT}{_UPPER}*{_LOWER}+%s|{_FRONT}{_UPPER}+{_LOWER}*%s"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORDS = _CASED.replace("%s", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _OTHERS
# Tekken's: an apostrophe begins a word, and digits stand alone.
_TEKKEN_WORDS = _CASED.replace("%s", "") + r"|\p{N}" + _OTHERS
# Qwen 3.5's: marks are letters. Seed's: signs take no end of a line along.
_QWEN_35_WORDS = (
    (_WORDS % "").replace(r"?\p{L}", r"?[\p{L}\p{M}]").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
)
_SEED_WORDS = (_WORDS % "").replace(r"+[\r\n]*", "+")
# DeepSeek's, one behind another.
_DEEPSEEK_3 = (
    *(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+"),
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_IDEOGRAMS_AND_SYLLABLES = "[\u0800-\u9fa5\uac00-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAMS_AND_SYLLABLES, r"\p{N}")
# Of letters with cases those that its authors listed.
_LISTED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa"
    r"\uab30-\uab68\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df1e}]]"
)
_SIGNS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_ENDS = (r"\s+$", _IDEOGRAMS_AND_SYLLABLES, r"\p{N}+")
_DEEPSEEK = (r"[\r\n]", rf"\s?{_LISTED}+", _SIGNS, *_ENDS)
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2")
_QWEN_2 = ("qwen2", "deepseek-r1-qwen")
_NEVER_STRIP = ("<unk>", "<s>", "<|endoftext|>")
_WHOLE_WORDS = (*_LLAMA_3, "tekken")
"""Tokenizers that take a word which is a token as it is, whatever its merges give, and that begin a
text with a start token."""
_NORMALISED = (*_QWEN_2, "qwen35", "olmo", "mpt", "command-r")
"""Tokenizers that bring letters and their accents together first (NFC)."""
_DIGITS_FIRST = ("smollm", "refact", "starcoder", "command-r")
"""Digits by themselves, then as GPT-2. The other order joins white space to a digit."""
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_DIGITS_FIRST, "gpt-2", "olmo", "mpt", "exaone4"), ()),
    **dict.fromkeys((*_LLAMA_3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_WORDS % "{1,3}",)),
    **dict.fromkeys((*_QWEN_2, "stablelm2"), (_WORDS % "",)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_3),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    "qwen35": (_QWEN_35_WORDS,),
    "seed-coder": (_SEED_WORDS,),
    "gpt-4o": (_CASED_WORDS,),
    "tekken": (_TEKKEN_WORDS,),
}
"""Expressions by the name of a splitting; none: GPT-2's. Granite has "refact", OLMoE "olmo", OLMo 2
and Phi-4 "dbrx", SmolLM3 "smaug-bpe", Phi-4-mini "gpt-4o", GLM-4.5 "glm4"."""


def write_tokenizer(
    gguf: Path, fields: GgufTokenizerFields, context_length: int, into: Path
) -> None:
    """Write ``tokenizer.json``, its settings and the chat template.

    Raises:
        ModelLoadError: the file's tokenizer is damaged, or is none that can be rebuilt exactly.
    """
    _check(gguf, fields)
    fields = _without_filler(fields)
    try:
        tokenizer = _rebuilt(fields)
    except Exception as error:  # tokenizers raises bare ones, such as for merges of no tokens
        raise ModelLoadError(
            f"{gguf}: its tokenizer is damaged ({error!s:.200}). Download the file again"
        ) from error
    # Its own `save` raises bare exceptions when the disk is full.
    (into / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    named = {
        key.removesuffix("_id"): fields.tokens[index] for key, index in fields.special_ids().items()
    }
    settings = {
        # GPT2Tokenizer would put its own pre-tokenizer in place of the one in tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    content = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (into / "tokenizer_config.json").write_text(content, encoding="utf-8")
    if fields.chat_template is not None:
        (into / "chat_template.jinja").write_text(fields.chat_template, encoding="utf-8")


def _check(gguf: Path, fields: GgufTokenizerFields) -> None:
    is_split, has_scores = fields.tokenizer_model == "gpt2", fields.tokenizer_model == "llama"
    if is_split and fields.pre_tokenizer not in _SPLITS:
        raise ModelLoadError(
            f"{gguf}: how its tokenizer {fields.pre_tokenizer!r:.80} splits text is not known, "
            f"only {', '.join(_SPLITS)}; get the model as safetensors"
        )
    problems = {
        "a token is there twice": len(set(fields.tokens)) < len(fields.tokens),
        "there is not one type for each token": len(fields.token_type) != len(fields.tokens),
        "a special token is outside of the vocabulary": any(
            index >= len(fields.tokens)
            for index in (*fields.special_ids().values(), *fields.end_ids())
        ),
        "it adds a start token and names none": _adds_bos(fields) and fields.bos_token_id is None,
        "a token is too long": any(len(token) > 1000 for token in fields.tokens),  # to divide
        "it has no merges": not has_scores and not fields.merges,
        "there is not one score for each token": has_scores
        and len(fields.scores) != len(fields.tokens),
    }
    if problem := next((problem for problem, is_so in problems.items() if is_so), None):
        raise ModelLoadError(
            f"{gguf}: its tokenizer is damaged: {problem}. Download the file again"
        )


def _without_filler(fields: GgufTokenizerFields) -> GgufTokenizerFields:
    """Without the names behind the last token: files have as many as their model has rows."""
    named = {*fields.special_ids().values(), *fields.end_ids()}
    kinds = enumerate(zip(fields.tokens, fields.token_type, strict=True))
    ids = (
        index
        for index, (token, kind) in kinds
        # Older files call such names user defined.
        if index in named or (kind != _UNUSED and token != f"[PAD{index}]")
    )
    count = 1 + max(ids, default=-1)
    kept = {name: getattr(fields, name)[:count] for name in ("tokens", "token_type", "scores")}
    return fields.model_copy(update=kept)


def _rebuilt(fields: GgufTokenizerFields) -> Tokenizer:
    from tokenizers import AddedToken, processors

    tokenizer = _of_merges(fields) if fields.tokenizer_model == "gpt2" else _of_scores(fields)
    kinds = [*zip(fields.tokens, fields.token_type, strict=True)]
    # Special tokens of Phi-3 strip the white space after them, which no file says. Phi-4-mini has
    # this architecture and another tokenizer.
    strips = fields.architecture == "phi3" and fields.tokenizer_model == "llama"
    added = [
        AddedToken(token, special=True, rstrip=strips and token not in _NEVER_STRIP)
        for token, kind in kinds
        if kind == _CONTROL
    ]
    tokenizer.add_special_tokens(added)
    own = [AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    tokenizer.add_tokens(own)
    if _adds_bos(fields) and fields.bos_token_id is not None:
        bos = fields.tokens[fields.bos_token_id]
        template = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", f"{bos}:1", "$B:1"],
            special_tokens=[(bos, fields.bos_token_id)],
        )
        before = [tokenizer.post_processor] if tokenizer.post_processor is not None else []
        tokenizer.post_processor = processors.Sequence([*before, template])
    return tokenizer


def _of_merges(fields: GgufTokenizerFields) -> Tokenizer:
    """A tokenizer of the kind "gpt2": bytes as letters, merged by rank."""
    from tokenizers import Tokenizer, decoders, models, processors

    vocabulary = {token: index for index, token in enumerate(fields.tokens)}
    merges = [_pair(merge) for merge in fields.merges]
    whole_words = fields.pre_tokenizer in _WHOLE_WORDS
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = _pre_tokenizer(fields.pre_tokenizer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    if fields.pre_tokenizer in _NORMALISED:
        from tokenizers.normalizers import NFC

        tokenizer.normalizer = NFC()
    return tokenizer


def _of_scores(fields: GgufTokenizerFields) -> Tokenizer:
    """A tokenizer of the kind "llama": characters, merged by the scores of the merged tokens; or of
    the kind "gemma4", which has an order of its own.

    Characters that are no tokens become bytes. A space is put before each stretch of text between
    special tokens, as llama.cpp does; the first of a decoded text is taken off again.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: index for index, token in enumerate(fields.tokens)}
    kinds = zip(fields.tokens, fields.token_type, strict=True)
    has_scores = fields.tokenizer_model == "llama"
    has_prefix = has_scores and fields.add_space_prefix
    merges = [_pair(merge) for merge in fields.merges]
    unknown = next((token for token, kind in kinds if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_by_score(fields, vocabulary) if has_scores else merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback="<0x00>" in vocabulary,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    to_text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*to_text, *strip])
    return tokenizer


def _merges_by_score(
    fields: GgufTokenizerFields, vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, the likeliest first."""
    usual = (_NORMAL, _USER_DEFINED)
    found = [
        (-score, start, token[:start], token[start:])
        for token, score, kind in zip(fields.tokens, fields.scores, fields.token_type, strict=True)
        if kind in usual
        for start in range(1, len(token))
        if token[:start] in vocabulary and token[start:] in vocabulary
    ]
    return [pair[2:] for pair in sorted(found, key=lambda pair: pair[:2])]


def _pair(merge: str) -> tuple[str, str]:
    first, second = merge.split(" ")
    return first, second


def _adds_bos(fields: GgufTokenizerFields) -> bool:
    """Whether texts begin with a start token; llama.cpp's default where the file does not say."""
    if fields.add_bos_token is not None and fields.tokenizer_model != "gemma4":
        return fields.add_bos_token
    return fields.tokenizer_model != "gpt2" or fields.pre_tokenizer in _WHOLE_WORDS


def _pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    patterns = _SPLITS[name]
    parts: list[Any] = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns]
    if name in _DIGITS_FIRST:
        parts = [pre_tokenizers.Digits(individual_digits=True)]
    # Its own expression is GPT-2's.
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns))
    return pre_tokenizers.Sequence(parts) if parts[1:] else parts[0]
