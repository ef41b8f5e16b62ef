"""GGUF files of each family: the numbers, logits and text of the same checkpoint as safetensors.

The files are written with the names of the format's own package, so that our names are compared
with others. The checkpoints beside them hold what the files hold, dequantised.
"""

from __future__ import annotations

import functools
import random
import struct
import tempfile
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.gguf import FAMILIES as WRITTEN
from benchmarks.gguf import QUANTISATIONS, write_gguf
from benchmarks.gguf_models import MODELS, save_tiny
from benchmarks.quality import measure_quality
from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import ModelLoadError
from foredraft.core.params import SamplingParams
from foredraft.drafters.none import NoDrafter
from foredraft.models.families import FAMILIES
from foredraft.models.files import gguf as reader
from foredraft.models.files.gguf_checkpoint import _write_description
from foredraft.models.files.safety import Checkpoint
from foredraft.models.native.config import read_config
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import why_not_as_stored
from tests.conformance.harness import plain
from tests.engine.helpers import engine_of
from tests.engine.test_hybrids import RandomTrees, plain_text
from tests.models.checkpoints import need_kernel
from tests.models.gguf_files import ARRAY, Typed, entry
from tests.models.loaded import logits_at_once, plan_of, target_of
from tests.models.test_gguf import EDGES, mutated

KEPT = [name for name in QUANTISATIONS if name.startswith("q")]
PROMPTS = ([3, 1, 4, 1, 5], [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 200, 100, 50, 25])
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
NEAR_TIE = 5e-3
"""Between the logits of two tokens, of which activations of 16 bits may turn the order."""


@pytest.fixture(scope="module", autouse=True)
def _cache() -> Iterator[None]:
    need_kernel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREDRAFT_CACHE", f"{_scratch().name}/cache")
        yield
    _files.cache_clear()


@functools.cache
def _scratch() -> Any:
    return tempfile.TemporaryDirectory(prefix="foredraft-gguf-families-")


@functools.cache
def _files(family: str, kind: str) -> tuple[Path, Path]:
    """A GGUF file, and a directory with the same numbers in float32. "older deepseek-v2": its file
    has one tensor for keys and values of latents."""
    is_older, family = family.startswith("older "), family.removeprefix("older ")
    folder = Path(_scratch().name) / f"{family}-{kind}-{is_older}"
    original, same, path = folder / "original", folder / "same", folder / "model.gguf"
    save_tiny(original, family)
    written: dict[str, Any] = {}
    write_gguf(original, path, kind, written, is_older)
    same.mkdir()
    for file in original.glob("*.json"):
        (same / file.name).write_bytes(file.read_bytes())
    tensors = {name: torch.from_numpy(numbers).contiguous() for name, numbers in written.items()}
    save_file(tensors, same / "model.safetensors", metadata={"format": "pt"})
    return path, same


def _target(model: Path, **options: Any) -> NativeTarget:
    """With activations of 16 bits, which change next to nothing: files of K-quants have 8."""
    return target_of(plan_of(model, **{"activations": "int16", "dtype": "float32"} | options))


def _text(num_tokens: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, 299, (num_tokens,), generator=generator).tolist()
    return tokens


def _logits(target: NativeTarget, text: list[int] | None = None) -> torch.Tensor:
    """Of each token of a text."""
    return logits_at_once(target, text or _text(48))


def _check_same(family: str, kind: str) -> None:
    """Dequantised, the file gives the checkpoint's logits and text."""
    path, same = _files(family, kind)
    found, expected = _target(path), _target(same)
    assert found.config.model_type == expected.config.model_type
    assert torch.allclose(_logits(found), _logits(expected), rtol=0, atol=1e-4)
    assert plain(found, PROMPTS, GREEDY) == plain(expected, PROMPTS, GREEDY)


def _check_kept(family: str, kind: str) -> None:
    """As it comes, the file differs by what activations of 16 bits cost.

    Of some texts it may choose another expert that is nearly as good; of three short ones it does
    not in all.
    """
    path, same = _files(family, kind)
    plan = plan_of(path)
    assert plan.weights == "file"
    exact, kept = _target(same), _target(path, weights="file")
    texts = [_text(32, seed) for seed in range(3)] if exact.config.experts else [_text(96)]
    costs = [measure_quality(exact, kept, [text]).mean_kl for text in texts]
    # A projection in floats is rounded to 8 bits.
    assert min(costs) < (1e-4 if exact.config.input_size else 1e-6)
    text = texts[costs.index(min(costs))]
    expected = _logits(exact, text)
    best, second = expected.topk(2).values.T
    is_clear = best - second > NEAR_TIE
    assert is_clear.float().mean() > 0.9
    assert torch.equal(_logits(kept, text).argmax(1)[is_clear], expected.argmax(1)[is_clear])


@pytest.mark.parametrize("number", range(len(MODELS)), ids=list(MODELS))
def test_a_file_computes_what_the_checkpoint_computes(number: int) -> None:
    """One format each; all of them together: `test_each_family_in_each_format`."""
    family = list(MODELS)[number]
    kind = KEPT[number % len(KEPT)]
    _check_same(family, kind)
    _check_kept(family, kind)


@pytest.mark.parametrize(("family", "kind"), [("deepseek-v2", "q4_k"), ("deepseek-v3", "q8_0")])
def test_files_of_latents_from_before_their_keys_stood_apart(family: str, kind: str) -> None:
    path, _ = _files(f"older {family}", kind)
    file = reader.GgufFile(path)
    assert "blk.0.attn_kv_b.weight" in file.tensors
    assert "blk.0.attn_k_b.weight" not in file.tensors
    _check_same(f"older {family}", kind)
    assert plan_of(path).weights == "file"
    exact, kept = _target(path), _target(path, weights="file")
    costs = [measure_quality(exact, kept, [_text(32, seed)]).mean_kl for seed in range(3)]
    assert min(costs) < 1e-3, "what makes keys is kept in 8 bits"


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUANTISATIONS)
@pytest.mark.parametrize("family", MODELS)
def test_each_family_in_each_format(family: str, kind: str) -> None:
    _check_same(family, kind)
    if kind in KEPT:
        _check_kept(family, kind)


def test_each_family_of_such_files_is_here() -> None:
    known = {name for name, family in FAMILIES.items() if family.gguf is not None}
    assert known == set(WRITTEN)
    assert known == {model_type for model_type, _ in MODELS.values()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("model", ["gemma4", "gemma4-moe"])
def test_drafts_change_no_text_of_layers_with_other_heads(model: str, temperature: float) -> None:
    """As the file is, with trees of drafts, four texts at once."""
    target = _target(_files(model, "q4_k")[0], weights="file")
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    alone = engine_of(target, NoDrafter(), FixedBudget(0), max_batch_size=1)
    texts = {tuple(prompt): plain_text(alone, prompt, params) for prompt in (*PROMPTS, _text(60))}
    expected, found = dict[int, list[int]](), dict[int, list[int]]()
    drafter = RandomTrees(random.Random(model), expected)
    engine = engine_of(target, drafter, FixedBudget(12), max_batch_size=4)
    for prompt, text in texts.items():
        (row,) = engine.prepare(prompt, params)
        expected[row.request_id], found[row.request_id] = [*prompt, *text], [*prompt]
        engine.add([row], lambda event: found[event.request_id].extend(event.token_ids))
    while engine.has_work:
        engine.step()
    assert found == expected
    assert drafter.num_accepted > 20


def test_a_projection_in_floats_is_rounded_and_said() -> None:
    plan = plan_of(_files("gemma4", "q4_k")[0])
    (note,) = plan.notes
    assert "its projection of embeddings, stored as F32, is kept in 8 bits" in note


def test_keys_and_values_that_no_layer_reads_are_left_out(tmp_path: Path) -> None:
    """Published checkpoints of Gemma 4 have them for layers that read another's entries."""
    save_tiny(tmp_path, "gemma4")
    own = load_file(tmp_path / "model.safetensors")
    for part in ("k_proj", "v_proj", "k_norm"):
        for layer in (2, 3):
            name = f"model.layers.{layer}.self_attn.{part}.weight"
            own[name] = own[name.replace(f"{layer}.", f"{layer - 2}.", 1)].clone()
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, path, "f32")
    without = _logits(_target(path))
    save_file(own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_gguf(tmp_path, path, "f32")
    assert "blk.3.attn_v.weight" in reader.GgufFile(path).tensors
    assert torch.equal(_logits(_target(path)), without)


@pytest.mark.parametrize("part", ["down_proj", "up_proj"])
def test_experts_in_formats_of_their_own_are_not_kept(part: str) -> None:
    """Those that each token reads lie in one matrix with the others."""
    plan = plan_of(_files("qwen3-next", "q8_0")[0])
    assert plan.weights == "file"
    assert plan.checkpoint is not None
    tensors = dict(plan.checkpoint.tensors)
    name = f"model.layers.1.mlp.shared_expert.{part}.weight"
    tensors[name] = replace(tensors[name], dtype="Q4_0")
    checkpoint = Checkpoint(plan.directory)
    vars(checkpoint)["tensors"] = tensors
    reason = why_not_as_stored(checkpoint, read_config(plan.directory))
    assert reason == "the experts of layer 1 have matrices in formats of their own"


# ------------------------------------------------------------------------------------ changed files

MOST_BYTES, MOST_TIMES = 1 << 20, 6
"""Traced while a file is described: a valid one takes 84 kB. A changed type or count can have the
weights read as texts, which are objects: one of two letters is ten bytes there, and 51 with a place
in a list here. So what is taken goes by the bytes that a file has, never by those it claims, and
headers end at 64 MB."""


def _refused_of_changed(model: str, count: int, patch: pytest.MonkeyPatch, part: int = 0) -> int:
    """Each file is described or refused in a sentence, and takes little memory: how many are.

    Args:
        part: each has other files.
    """
    valid = _files(model, "q8_0")[0].read_bytes()
    file = reader.GgufFile(_files(model, "q8_0")[0])
    header = min(tensor.start for tensor in file.tensors.values())
    keys = [key.encode() for key in file.metadata if key.startswith(_architecture(file))]
    draw, num_refused, content = random.Random(f"{model} {part}"), 0, valid
    patch.setattr(reader, "_mapped", lambda path: content)
    tracemalloc.start()
    for _ in range(count):
        content = mutated(draw, valid, header)
        if draw.random() < 0.5:
            content = _with_another_number(draw, valid, draw.choice(keys))
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        reason = _reason_of_refusal()
        taken = tracemalloc.get_traced_memory()[1] - before
        assert taken < MOST_BYTES + MOST_TIMES * len(content)
        assert len(reason.encode()) < 1000
        num_refused += bool(reason)
    tracemalloc.stop()
    return num_refused


def _architecture(file: reader.GgufFile) -> str:
    return f"{file.metadata['general.architecture']}."


def _with_another_number(draw: random.Random, valid: bytes, key: bytes) -> bytes:
    """Four bytes of what stands behind a key: its type, or a part of its value."""
    place = valid.index(key) + len(key) + draw.choice([0, 4, 4, 4, 8])
    number = draw.choice([*EDGES, 0x7F800000, 0x7FC00000, 0x3F800000, draw.randrange(2**32)])
    return valid[:place] + struct.pack("<I", number % 2**32) + valid[place + 4 :]


def _reason_of_refusal() -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            _write_description([reader.GgufFile(Path("changed.gguf"))], Path(folder))
        except ModelLoadError as refused:
            return str(refused)
    return ""


WRONG: dict[str, tuple[str, Typed | int | float, str]] = {
    "gemma3": ("attention.sliding_window", Typed(ARRAY, [7, 8], 4), "sliding_window is"),
    "gemma2": ("final_logit_softcapping", float("nan"), "final_logit_softcapping is nan"),
    "granite": ("rope.scaling.finetuned", Typed(7, False), "finetuned' asks for"),
    "qwen3-moe": ("expert_used_count", 7, "7 experts a token of 6"),
    "phi3": ("rope.scaling.type", "yarn", "rotary scaling 'yarn' with the tensors"),
    "olmo3": ("rope.freq_base_swa", 10.0, "windowed layers that have another base"),
    "gemma4": ("attention.value_length_swa", 64, "heads that differ between layers of a kind"),
    "gemma4-moe": ("embedding_length_per_layer_input", 3, "'blk.0.inp_gate.weight' is missing"),
}
"""By model: a key, what it says, and the refusal."""


@pytest.mark.parametrize("model", WRONG)
def test_what_a_family_says_wrongly_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key, value, message = WRONG[model]
    valid = _files(model, "q8_0")[0].read_bytes()
    file = reader.GgufFile(_files(model, "q8_0")[0])
    content = with_value(valid, file, f"{_architecture(file)}{key}", value)
    monkeypatch.setattr(reader, "_mapped", lambda path: content)
    assert message in _reason_of_refusal()


def with_value(valid: bytes, file: reader.GgufFile, key: str, value: Any) -> bytes:
    """The file with a value put in, or in place of what it has; its tensors stay aligned."""
    start = 4 + 4 + 8
    count = len(file.metadata)
    old = b""
    if key in file.metadata:
        found = file.metadata[key]
        old = entry(key, found if isinstance(found, int | float | str) else Typed(0, 0))
        assert old in valid
        count -= 1
    body = valid.replace(old, b"", 1) if old else valid
    header = body[:start] + struct.pack("<Q", count + 1) + entry(key, value) + body[start + 8 :]
    tensors = min(tensor.start for tensor in file.tensors.values())
    moved = len(entry(key, value)) - len(old)
    at = tensors + moved
    return header[:at] + bytes(-moved % 32) + header[at:]


@pytest.mark.parametrize("model", MODELS)
def test_changed_files_are_described_or_refused(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _refused_of_changed(model, 10, monkeypatch) > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("model", MODELS)
def test_ten_thousand_changed_files_are_described_or_refused(
    model: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 100 < _refused_of_changed(model, 1000, monkeypatch, part) < 1000
