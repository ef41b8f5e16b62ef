"""The folder of a trained drafter: its metadata and weights, written atomically.

``head.json`` (kind, config, target, provenance, measured acceptance), ``weights.safetensors``,
``README.md``, and of heads ``self_test.safetensors``. A process may be killed at any moment while
they are written: the folder then holds the earlier files, or both halves of the swap, which the
next `finish_saving` completes.

Shape legend: N token ids, E hidden size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from safetensors.torch import load_file
from torch import Tensor

from foredraft.core.errors import CapabilityError, ConfigError, ModelLoadError
from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.heads.published import Sizes, fill
from foredraft.drafters.spec import DrafterContext
from foredraft.models.base import ModelShape, Target, offered
from foredraft.models.files.json_files import parse_fields, read_json
from foredraft.models.files.manifest import sha256_of
from foredraft.models.files.safety import Checkpoint, check_safetensors
from foredraft.models.files.stored import read_rows
from foredraft.system.files import flush_folder, write_tensors, write_text

META, WEIGHTS, SELF_TEST, CARD = (
    "head.json",
    "weights.safetensors",
    "self_test.safetensors",
    "README.md",
)
_FORMAT = 1
_NEXT, _READY = ".next", ".ready"
_SAMPLED_ROWS = 512


@dataclass(frozen=True)
class TargetIdentity:
    """Which target a head belongs to.

    Attributes:
        name: what people call it.
        fingerprint: of its sizes and embeddings, whatever dtype it was loaded in.
        tokenizer: fingerprint of its tokenizer; None where that is not known.
        weights: digest of all its weights (`foredraft.models.files.digest`), which tells it from
            fine-tunes that left the embeddings alone; None where that is not known.
    """

    name: str
    fingerprint: str
    tokenizer: str | None = None
    weights: str | None = None


@dataclass(frozen=True)
class HeadInfo:
    """Content of ``head.json``.

    Attributes:
        kind: the registered name of the drafter.
        config: of the module.
        shape: of the target.
        measured: acceptance on held-out text.
    """

    kind: str
    config: Mapping[str, Any]
    shape: ModelShape
    target: TargetIdentity
    provenance: Mapping[str, Any]
    measured: Mapping[str, Any]
    weights_sha256: str = ""

    @property
    def promise(self) -> tuple[float, float] | None:
        """The chances that its first token is right, at temperatures 0 and 1, if measured."""
        first = [self.measured.get(name) for name in ("greedy", "sampled")]
        greedy, sampled = [each[0] if isinstance(each, list) and each else None for each in first]
        return None if greedy is None or sampled is None else (float(greedy), float(sampled))


@torch.no_grad()
def identify(
    target: Target, name: str | None = None, tokenizer: str | None = None
) -> TargetIdentity:
    """Identity of a target.

    The embeddings of some tokens tell models apart, fine-tuned ones of one base included as long
    as the embeddings were trained. Rounded to bfloat16 they are the same in every dtype and with
    int8 layers.

    Raises:
        CapabilityError: the target does not hand out its embeddings.
    """
    if target.capabilities.parts is None:
        raise CapabilityError(
            f"a trained head needs a target that hands out its embeddings, which "
            f"{type(target).__name__} does not"
        )
    sizes = sizes_of(target)
    digest = fingerprint(sizes, target.capabilities.parts.embed)
    described = f"a target of {sizes[2]} layers, {sizes[1]} wide, {sizes[0]} tokens"
    return TargetIdentity(name or described, digest, tokenizer)


def sizes_of(target: Target) -> tuple[int, int, int]:
    """Its vocabulary, the width of its hidden states, and how many layers it has."""
    hidden_size = offered(target.capabilities.parts).hidden_size
    return target.vocab_size, hidden_size, len(target.capabilities.taps)


def fingerprint(sizes: tuple[int, int, int], embed: Callable[[Tensor], Tensor]) -> str:
    """Fingerprint of a target.

    Args:
        sizes: of vocabulary and hidden states, and how many layers.
        embed: the embeddings [N, E] of some ids [N].
    """
    ids = torch.arange(0, sizes[0], max(1, sizes[0] // _SAMPLED_ROWS))
    rows = embed(ids).to(torch.bfloat16).cpu().contiguous().view(torch.int16)
    return hashlib.sha256(repr(sizes).encode() + rows.numpy().tobytes()).hexdigest()[:16]


def write_folder(
    directory: Path,
    info: HeadInfo,
    weights: Mapping[str, Tensor],
    card: str,
    self_test: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a folder; an earlier one is replaced when all is written.

    Args:
        info: content of ``head.json``; the digest of the weights' file is added.
        card: the text of README.md.
        self_test: results computed with them, by name; None: they are only looked up.

    Raises:
        TrainingError: it cannot be written, such as on a full disk.
    """
    finish_saving(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(directory / _NEXT, ignore_errors=True)
    (directory / _NEXT).mkdir()
    write_tensors(directory / _NEXT / WEIGHTS, weights)
    if self_test is not None:
        write_tensors(directory / _NEXT / SELF_TEST, self_test)
    info = replace(info, weights_sha256=sha256_of(directory / _NEXT / WEIGHTS))
    meta = json.dumps({"format": _FORMAT} | asdict(info), indent=2)
    write_text(directory / _NEXT / META, meta + "\n")
    write_text(directory / _NEXT / CARD, card)
    os.replace(directory / _NEXT, directory / _READY)
    flush_folder(directory)
    finish_saving(directory)


def finish_saving(directory: Path) -> None:
    """Complete a swap that a kill has interrupted."""
    ready = directory / _READY
    if not ready.is_dir():
        return
    for path in sorted(ready.iterdir()):
        os.replace(path, directory / path.name)
    ready.rmdir()
    flush_folder(directory)


def read_info(directory: Path) -> HeadInfo:
    """Metadata of a head's directory.

    Raises:
        ConfigError: there is no head.
        ModelLoadError: ``head.json`` cannot be used.
    """
    path = directory / META
    if not path.is_file():
        theirs = (directory / "config.json").is_file()
        more = "; a published EAGLE checkpoint goes with drafter 'eagle'" if theirs else ""
        raise ConfigError(f"{directory} holds no trained head: there is no {META}{more}")
    content = read_json(path)
    if content.get("format") != _FORMAT:
        raise ModelLoadError(
            f"{path} is of format {content.get('format')!r:.40} and this version reads format "
            f"{_FORMAT}; train it again, or use the version that it was made with"
        )
    found = parse_fields(path, content, _Meta)
    target, shape = TargetIdentity(**dict(found.target)), found.shape.shape
    measured = found.measured.model_dump(exclude_unset=True)
    return HeadInfo(**dict(found) | {"shape": shape, "target": target, "measured": measured})


class _Target(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    fingerprint: str
    tokenizer: str | None = None
    weights: str | None = None


_Chances = dict[str, Any] | list[Annotated[float, Field(ge=0.0, le=1.0)]] | None


class _Measured(BaseModel):
    """Chances by depth (of a table by opinion), and further figures."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, FiniteFloat | list[Any] | dict[str, Any] | None]

    greedy: _Chances = None
    sampled: _Chances = None
    overlap: _Chances = None


class _Meta(BaseModel):
    """Fields of ``head.json``."""

    kind: str
    config: dict[str, Any]
    shape: Sizes
    target: _Target
    provenance: dict[str, Any]
    measured: _Measured
    weights_sha256: str


def check_target(info: HeadInfo, target: TargetIdentity, where: Path) -> None:
    """Refuse a head of another target.

    Raises:
        ConfigError: it is.
    """
    trained = info.target
    same_words = None in (trained.tokenizer, target.tokenizer) or (
        trained.tokenizer == target.tokenizer
    )
    if trained.fingerprint != target.fingerprint or not same_words:
        raise ConfigError(
            f"the head in {where} was trained for {trained.name!r} (fingerprint "
            f"{trained.fingerprint}), and the target is {target.name!r} (fingerprint "
            f"{target.fingerprint}): it would guess at random. Train one for this target: "
            f"foredraft train {info.kind}"
        )


def check_kind(info: HeadInfo, kind: str, directory: Path) -> None:
    """Refuse a folder of another drafter.

    Raises:
        ConfigError: it is of another kind.
    """
    if info.kind != kind:
        raise ConfigError(
            f"the head in {directory} is of kind {info.kind!r} and not {kind!r}; use it "
            f"with drafter {info.kind!r}"
        )


def check_weights(directory: Path, info: HeadInfo) -> None:
    """See that the weights' file is the one that was written.

    Raises:
        ModelLoadError: it is damaged.
    """
    path = directory / WEIGHTS
    check_safetensors(path)
    if sha256_of(path) != info.weights_sha256:
        raise ModelLoadError(
            f"{path} is not what {META} says: the head is damaged, or its saving was interrupted "
            "(training it further completes that). Copy it again"
        )


M = TypeVar("M", bound=HeadModule)


# ----------------------------------------------------------------------------------- loading


def load_head(
    directory: Path,
    module: type[M],
    target: TargetIdentity,
    *,
    sizes: tuple[int, int, int] | None = None,
    device: torch.device | str = "cpu",
) -> M:
    """A trained head, checked: kind, target, shapes and weights.

    Args:
        target: that it drafts for; see `identify`.
        sizes: of the target, see `sizes_of`; None: they are not compared.

    Raises:
        ConfigError: no head is there, it is of another kind, or of another target.
        ModelLoadError: it is damaged.
    """
    info = read_info(directory)
    check_kind(info, module.kind, directory)
    check_target(info, target, directory)
    _check_sizes(info.shape, sizes, directory / META)
    head = read_head(directory, module, info).to(device)
    head.promise = info.promise
    return head


def read_head(directory: Path, module: type[M], info: HeadInfo) -> M:
    """The module in float32 on the CPU, its weights compared with their digest.

    Raises:
        ModelLoadError: it is damaged.
    """
    check_weights(directory, info)
    try:
        with torch.device("meta"):
            head = module.from_config(info.shape, info.config)
    except ConfigError as error:
        raise ModelLoadError(
            f"{directory / META}: {error}. If another version of foredraft wrote it, train it "
            "again, or draft with that version"
        ) from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelLoadError(
            f"{directory / META}: its config describes no head of kind {module.kind!r}"
        ) from error
    fill(head, load_file(directory / WEIGHTS), str(directory / WEIGHTS))
    return head


def _check_sizes(shape: ModelShape, sizes: tuple[int, int, int] | None, path: Path) -> None:
    theirs = (shape.vocab_size, shape.hidden_size, shape.num_hidden_layers)
    if sizes not in (None, theirs):
        raise ModelLoadError(
            f"{path}: its shape is that of a target of {theirs[2]} layers, {theirs[1]} wide, with "
            f"{theirs[0]} tokens, unlike the target that it names"
        )


SHIPPED = Path(__file__).parents[1] / "heads"
_EMBEDDINGS = "model.embed_tokens.weight"


def shipped_head(kind: str, target: Target) -> Path | None:
    """The directory of a head of this kind for this very target; None: there is none."""
    if not target.capabilities.parts:
        return None
    return _shipped_for(identify(target).fingerprint).get(kind)


def shipped_head_of_files(kind: str, checkpoint: Checkpoint) -> Path | None:
    """The same from the target's files, of which it reads a few rows of the embeddings."""
    found = fingerprint_of_files(checkpoint)
    return None if found is None else _shipped_for(found).get(kind)


def fingerprint_of_files(checkpoint: Checkpoint) -> str | None:
    """The fingerprint that `identify` gives for the loaded target; None: no embeddings."""
    stored = checkpoint.tensors.get(_EMBEDDINGS)
    if stored is None or len(stored.shape) != 2:
        return None
    sizes = (*stored.shape, int(checkpoint.config.get("num_hidden_layers", 0)))
    return fingerprint(sizes, lambda ids: read_rows(stored, _EMBEDDINGS, ids))


def _shipped_for(fingerprint: str) -> dict[str, Path]:
    """Heads that come with the package for a target, by kind."""
    metas = [(path, json.loads(path.read_text())) for path in sorted(SHIPPED.glob(f"*/*/{META}"))]
    return {
        meta["kind"]: path.parent
        for path, meta in metas
        if meta["target"]["fingerprint"] == fingerprint
    }


HEAD_OPTION = MappingProxyType(
    {"head": "directory of the trained head (needed unless one comes with the model)"}
)


def named_folder(context: DrafterContext, drafter: str, option: str) -> Path | None:
    """The directory that the user named with an option; None: the option is not there.

    Raises:
        ConfigError: it is empty.
    """
    given = context.options.get(option)
    if given is None:
        return None
    if not str(given).strip():
        raise ConfigError(
            f"option {option} of drafter {drafter!r} is empty; name a directory, or leave it out"
        )
    return Path(str(given)).expanduser()


def trained_head(context: DrafterContext, module: type[M]) -> M:
    """The head that the user named, or that comes with the package, checked against the target.

    Raises:
        ConfigError: none was named, it is not there, or it is of another kind or target.
        ModelLoadError: it is damaged.
    """
    given = named_folder(context, module.kind, "head") or shipped_head(module.kind, context.target)
    if given is None:
        raise ConfigError(
            f"drafter {module.kind!r} needs a trained head. Train one with 'foredraft train "
            f"{module.kind} --target MODEL --out DIR', and name its directory with the drafter "
            "option head"
        )
    identity = identify(context.target, None, context.fingerprint)
    device = offered(context.target.capabilities.parts).device
    return load_head(given, module, identity, sizes=sizes_of(context.target), device=device)
