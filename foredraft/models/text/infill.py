"""Filling in the middle: the text between a prefix and a suffix, for models that have the tokens.

The families differ in the names of their tokens and in the order of the two texts (Bavarian et al.,
Efficient training of language models to fill in the middle, arXiv 2207.14255).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.core.errors import ConfigError
from foredraft.models.text.tokenizer import Tokenizer

_BAR = "\uff5c"  # a wide vertical line
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder and later, Gemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    (f"<{_BAR}fim▁begin{_BAR}>", f"<{_BAR}fim▁hole{_BAR}>", f"<{_BAR}fim▁end{_BAR}>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
_SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")
"""Codestral: the suffix, then the prefix, behind which it goes on."""
_REPOSITORIES = ("<|repo_name|>", "<reponame>", "<repo_name>")
_FILES = ("<|file_sep|>", "<file_sep>")
_PADS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<|endoftext|>")
_ENDS = (*_PADS, *_REPOSITORIES, *_FILES)


@dataclass(frozen=True)
class Infill:
    """The tokens with which a model fills a hole in.

    Attributes:
        prefix, suffix: ids before the two texts.
        middle: ids behind both, where the reply begins.
        repository, file: before the name of a repository and of each other file of it; empty: the
            model has no such token.
        ends: ids that end what is filled in, beside those that end any text.
    """

    prefix: int
    suffix: int
    middle: tuple[int, ...]
    repository: tuple[int, ...]
    file: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infill:
        """The model's tokens.

        Raises:
            ConfigError: it has none.
        """

        def ids(names: Sequence[str]) -> tuple[int, ...]:
            return tuple(i for name in names if (i := tokenizer.id_of(name)) is not None)

        for names in (*_MARKS, _SUFFIX_FIRST):
            marks = ids(names)
            if len(marks) == len(names):
                ends = {*ids(_ENDS), *marks} - {*tokenizer.eos_token_ids}
                others = ids(_REPOSITORIES)[:1], ids(_FILES)[:1], tuple(sorted(ends))
                return cls(marks[0], marks[1], marks[2:], *others)
        raise ConfigError(
            "this model has no tokens for a text to be filled in (such as <|fim_prefix|>); leave "
            "suffix out, or serve a model of code that has them",
            field="suffix",
        )

    def prompt(
        self,
        tokenizer: Tokenizer,
        prefix: str,
        suffix: str,
        begun: str = "",
        files: Sequence[tuple[str, str]] = (),
    ) -> list[int]:
        """The ids of a prompt whose reply stands between the two texts.

        Args:
            begun: the beginning of the line that is filled in; it stands behind the prefix.
            files: names and texts of other files, as llama.cpp's ``/infill`` shows them.
        """

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        shown: list[int] = []
        if files and self.file:
            shown += [*self.repository, *encode("myproject\n")] if self.repository else []
            for name, text in files:
                shown += [*self.file, *encode(f"{name}\n{text}")]
            shown += [*self.file, *encode("filename\n")]
        else:
            shown += encode("".join(f"\n\n--- snippet ---\n\n{text}" for _, text in files))
        before = [self.prefix, *encode(prefix + begun)]
        behind = [self.suffix, *encode(suffix)]
        texts = [*before, *behind] if self.middle else [*behind, *before]
        return [*tokenizer.encode(""), *shown, *texts, *self.middle]
