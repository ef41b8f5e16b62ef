"""The folder of something that was learnt for a target: what it says of itself, written whole.

``head.json`` (kind, config, target, provenance, measured acceptance), ``weights.safetensors``,
``self_test.safetensors`` and ``README.md``. A process may be killed at any moment while they are
written: the folder then holds what was there before, or both halves of the swap, which the next
`finish_saving` completes.

Shape legend: N token ids, E hidden size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from foredraft.core.errors import CapabilityError, ConfigError, ModelLoadError
from foredraft.models.base import ModelShape, PartsTarget, Target
from foredraft.models.files.json_files import read_json
from foredraft.models.files.manifest import sha256_of
from foredraft.models.files.safety import check_safetensors
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
_LARGEST = 1 << 24
"""No number of a head's config is larger: sizes are looked at before memory is asked for."""


@dataclass(frozen=True)
class TargetIdentity:
    """Which target a head belongs to.

    Attributes:
        name: what people call it.
        fingerprint: of its sizes and embeddings, whatever dtype it was loaded in.
        tokenizer: fingerprint of its tokenizer; None where that is not known.
    """

    name: str
    fingerprint: str
    tokenizer: str | None = None


@dataclass(frozen=True)
class HeadInfo:
    """What ``head.json`` says.

    Attributes:
        kind: the registered name of the drafter.
        config: of the module.
        shape: of the target.
        target: whose head it is.
        provenance: how it was made.
        measured: acceptance on held-out text.
        weights_sha256: of the weights' file.
    """

    kind: str
    config: Mapping[str, Any]
    shape: ModelShape
    target: TargetIdentity
    provenance: Mapping[str, Any]
    measured: Mapping[str, Any]
    weights_sha256: str

    @property
    def promise(self) -> tuple[float, float] | None:
        """The chances that its first token is right, at temperatures 0 and 1, if measured."""
        first = [self.measured.get(name) for name in ("greedy", "sampled")]
        greedy, sampled = [each[0] if each else None for each in first]
        return None if greedy is None or sampled is None else (float(greedy), float(sampled))


@torch.no_grad()
def identify(
    target: Target, name: str | None = None, tokenizer: str | None = None
) -> TargetIdentity:
    """Who a target is.

    The embeddings of some tokens tell models apart, fine-tuned ones of one base included as long
    as the embeddings were trained. Rounded to bfloat16 they are the same in every dtype and with
    int8 layers.

    Raises:
        CapabilityError: the target does not hand out its embeddings.
    """
    if not target.capabilities.parts:
        raise CapabilityError(
            f"a trained head needs a target that hands out its embeddings, which "
            f"{type(target).__name__} does not"
        )
    parts, vocab = cast(PartsTarget, target).parts, target.vocab_size
    layers = target.capabilities.taps
    digest = fingerprint((vocab, parts.hidden_size, len(layers)), parts.embed)
    described = f"a target of {len(layers)} layers, {parts.hidden_size} wide, {vocab} tokens"
    return TargetIdentity(name or described, digest, tokenizer)


def fingerprint(sizes: tuple[int, int, int], embed: Callable[[Tensor], Tensor]) -> str:
    """Of a target.

    Args:
        sizes: of vocabulary and hidden states, and how many layers.
        embed: the embeddings [N, E] of some ids [N].
    """
    ids = torch.arange(0, sizes[0], max(1, sizes[0] // _SAMPLED_ROWS))
    rows = embed(ids).to(torch.bfloat16).cpu().contiguous().view(torch.int16)
    return hashlib.sha256(repr(sizes).encode() + rows.numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Learnt:
    """What goes into a folder.

    Attributes:
        kind: the registered name of the drafter that uses it.
        config: what makes it again, as JSON values.
        shape: of the target.
        weights: by name.
        self_test: likewise.
        card: the text of README.md.
    """

    kind: str
    config: Mapping[str, Any]
    shape: ModelShape
    weights: Mapping[str, Tensor]
    self_test: Mapping[str, Tensor]
    card: str


def write_folder(directory: Path, learnt: Learnt, info: Mapping[str, Any]) -> None:
    """Write a folder; what was there before is replaced when all is written.

    Args:
        info: ``target`` (`TargetIdentity`), ``provenance`` and ``measured`` of `HeadInfo`.

    Raises:
        TrainingError: it cannot be written, such as on a full disk.
    """
    finish_saving(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(directory / _NEXT, ignore_errors=True)
    (directory / _NEXT).mkdir()
    write_tensors(directory / _NEXT / WEIGHTS, learnt.weights)
    write_tensors(directory / _NEXT / SELF_TEST, learnt.self_test)
    meta = {
        "format": _FORMAT,
        "kind": learnt.kind,
        "config": learnt.config,
        "shape": asdict(learnt.shape),
        "target": asdict(info["target"]),
        "provenance": dict(info["provenance"]),
        "measured": dict(info["measured"]),
        "weights_sha256": sha256_of(directory / _NEXT / WEIGHTS),
    }
    write_text(directory / _NEXT / META, json.dumps(meta, indent=2) + "\n")
    write_text(directory / _NEXT / CARD, learnt.card)
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
    """What a head's directory says of itself.

    Raises:
        ConfigError: there is no head.
        ModelLoadError: ``head.json`` cannot be used.
    """
    path = directory / META
    if not path.is_file():
        theirs = (directory / "config.json").is_file()
        more = "; a published EAGLE checkpoint goes with drafter 'eagle3'" if theirs else ""
        raise ConfigError(f"{directory} holds no trained head: there is no {META}{more}")
    content = read_json(path)
    if content.get("format") != _FORMAT:
        raise ModelLoadError(
            f"{path} is of format {content.get('format')!r:.40} and this version reads format "
            f"{_FORMAT}; train it again, or use the version that it was made with"
        )
    try:
        _check_numbers(content["config"])
        _check_numbers(content["shape"])
        return HeadInfo(
            kind=str(content["kind"]),
            config=dict(content["config"]),
            shape=ModelShape(**content["shape"]),
            target=TargetIdentity(**content["target"]),
            provenance=dict(content["provenance"]),
            measured=dict(content["measured"]),
            weights_sha256=str(content["weights_sha256"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be used: {error!r:.200}") from error


def _check_numbers(value: Any) -> None:
    """Refuse sizes that no head has."""
    if isinstance(value, Mapping):
        for each in value.values():
            _check_numbers(each)
    elif isinstance(value, list):
        if len(value) > _LARGEST:
            raise ValueError(f"a list of {len(value)} entries")
        for each in value:
            _check_numbers(each)
    elif isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"the number {value}, which is larger than {_LARGEST}")


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
    """Refuse what another drafter uses.

    Raises:
        ConfigError: it is of another kind.
    """
    if info.kind != kind:
        raise ConfigError(
            f"the head in {directory} is of kind {info.kind!r} and not {kind!r}; use it "
            f"with drafter {info.kind!r}"
        )


def check_weights(directory: Path, info: HeadInfo) -> dict[str, Any]:
    """The header of the weights' file, which is the one that was written.

    Raises:
        ModelLoadError: it is damaged.
    """
    path = directory / WEIGHTS
    stored = check_safetensors(path)
    if sha256_of(path) != info.weights_sha256:
        raise ModelLoadError(
            f"{path} is not what {META} says: the head is damaged, or its saving was interrupted "
            "(training it further completes that). Copy it again"
        )
    return stored
