"""Weights of GGUF files in the formats they come in: no weight changes, whatever is mixed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.quality import measure_quality
from foredraft import LLM, SamplingParams
from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.core.tree import TokenTree
from foredraft.load import load_target
from foredraft.models.base import ScoreRow
from foredraft.models.files.digest import weights_digest
from foredraft.models.files.gguf_blocks import KINDS
from foredraft.models.files.kept import KeptFiles
from foredraft.models.files.safety import GGUF_INDEX, Checkpoint
from foredraft.models.files.store import resolve_model
from foredraft.models.native.quant import FORMS, PackedMatrix, StackedMatrix, as_tensor
from foredraft.models.native.weights import AS_STORED, DecoderWeights, load_weights
from foredraft.options import LoadOptions
from tests.models.checkpoints import need_kernel
from tests.models.gguf_files import CODES, Stored, Typed, metadata_of, shape_of, write_gguf
from tests.models.gguf_files import tensors_of as stored_tensors
from tests.models.loaded import logits_one_by_one, plan_of, target_of
from tests.models.progress import RecordedProgress

NOTHING: Mapping[str, str] = MappingProxyType({})
K_M = {"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"}
"""What a Q4_K_M file holds in another format than the rest."""
MIXES = [(name, NOTHING) for name in FORMS if name in CODES]
MIXES += [("Q2_K", {"v_proj": "Q3_K", "lm_head": "Q6_K"}), ("IQ4_XS", {"q_proj": "IQ4_NL"})]
MIXES += [("Q4_K", K_M), ("Q5_0", {"v_proj": "Q8_0"}), ("Q5_1", {"up_proj": "Q4_0"})]


@pytest.fixture(autouse=True)
def kernel(cache: Path) -> None:
    need_kernel()


def gguf_of(
    folder: Path, kind: str, others: Mapping[str, str] = NOTHING, config: LlamaConfig | None = None
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file, and the numbers in it by their names in transformers."""
    config = config or shape_of()
    stored, weights = stored_tensors(config, kind, others)
    return write_gguf(folder / "model.gguf", metadata_of(config), stored), weights


def check_weights(found: DecoderWeights, expected: Mapping[str, torch.Tensor]) -> None:
    """Each number is the one that the file holds."""

    def numbers(name: str) -> torch.Tensor:
        return expected[f"{name}.weight"]

    assert isinstance(found.embedding_VE, PackedMatrix)
    embedding = numbers("model.embed_tokens")
    assert torch.equal(as_tensor(found.embedding_VE, torch.float32), embedding)
    head = expected.get("lm_head.weight", embedding)
    assert torch.equal(as_tensor(found.head_VE, torch.float32), head)
    assert torch.equal(found.final_norm_E, numbers("model.norm"))
    for index, layer in enumerate(found.layers):
        prefix = f"model.layers.{index}"
        qkv = torch.cat([numbers(f"{prefix}.self_attn.{part}_proj") for part in "qkv"])
        assert torch.equal(as_tensor(layer.qkv_weight, torch.float32), qkv)
        gate_up = torch.cat([numbers(f"{prefix}.mlp.{part}_proj") for part in ("gate", "up")])
        assert torch.equal(as_tensor(layer.gate_up_weight, torch.float32), gate_up)
        output, down = numbers(f"{prefix}.self_attn.o_proj"), numbers(f"{prefix}.mlp.down_proj")
        assert torch.equal(as_tensor(layer.output_weight, torch.float32), output)
        assert torch.equal(as_tensor(layer.down_weight, torch.float32), down)
        assert torch.equal(layer.attention_norm_E, numbers(f"{prefix}.input_layernorm"))


@pytest.mark.parametrize(("kind", "others"), MIXES, ids=str)
def test_the_very_weights_are_kept_and_multiplied(
    tmp_path: Path, kind: str, others: Mapping[str, str]
) -> None:
    """The divergence from the same numbers in float32 is that of activations of 16 bits."""
    config = shape_of(tie_word_embeddings=kind in ("Q8_0", "Q4_1"))
    path, expected = gguf_of(tmp_path, kind, others, config)
    plan = plan_of(path)
    assert (plan.weights, plan.dtype, plan.decoder) == ("file", "bfloat16", "fused")
    assert kind in plan.number_format
    target = target_of(plan)
    check_weights(target.weights, expected)
    assert target.weights.num_bytes == pytest.approx(plan.weight_bytes, rel=0.02)
    exact, reference = (
        target_of(plan_of(path, dtype="float32", weights=weights, activations="int16"))
        for weights in ("file", "auto")
    )
    assert reference.weights.bits == 32
    text = torch.randint(0, 299, (96,), generator=torch.Generator().manual_seed(3)).tolist()
    quality = measure_quality(reference, exact, [text])
    assert quality.mean_kl < 1e-6
    assert quality.top1_agreement == 1


@pytest.mark.parametrize(
    ("kind", "others", "bits"),
    [
        *(("Q4_K", K_M, 8), ("Q5_K", K_M, 8), ("Q6_K", NOTHING, 8), ("Q5_0", K_M, 16)),
        *(("Q8_0", K_M, 16), ("Q4_0", NOTHING, 16), ("Q5_1", NOTHING, 16)),
        *(("Q2_K", K_M, 8), ("Q3_K", NOTHING, 8), ("IQ4_XS", NOTHING, 16)),
    ],
)
def test_files_mostly_in_k_quants_are_multiplied_with_activations_of_8_bits(
    tmp_path: Path, kind: str, others: Mapping[str, str], bits: int
) -> None:
    path, _ = gguf_of(tmp_path, kind, others)
    assert plan_of(path).activation_bits == bits
    assert plan_of(path, activations="int16").activation_bits == 16
    assert plan_of(path, weights="bf16").activation_bits == 16


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize(
    ("kind", "others"),
    [
        *(("Q8_0", K_M), ("Q4_K", K_M), ("Q2_K", {"v_proj": "Q3_K"})),
        ("IQ4_XS", {"v_proj": "Q4_K", "o_proj": "IQ3_S"}),
    ],
    ids=str,
)
def test_a_token_has_the_same_bits_in_any_company(
    tmp_path: Path, kind: str, others: Mapping[str, str], activations: str
) -> None:
    target = target_of(plan_of(gguf_of(tmp_path, kind, others)[0], activations=activations))
    tokens = [7, 250, 31, 7, 98, 12, 255, 4, 33, 120, 121]
    alone = logits_one_by_one(target, tokens)
    slots = [target.cache.allocate() for _ in range(2)]
    rows = [ScoreRow(slot, tokens[:1], TokenTree.chain(tokens[1:])) for slot in slots]
    for scores in target.score(rows):
        assert torch.equal(scores.logits_NV, alone)


def test_weights_are_kept_as_they_were_packed(tmp_path: Path) -> None:
    path, expected = gguf_of(tmp_path, "Q4_K", K_M)
    checkpoint = Checkpoint(resolve_model(path))
    kept = KeptFiles.of(checkpoint, least_bytes=0)
    config = target_of(plan_of(path)).config
    loads = []
    for _ in range(2):
        progress = RecordedProgress()
        arguments = (checkpoint, config, torch.bfloat16, "cpu", AS_STORED, kept, progress)
        weights = load_weights(*arguments)  # type: ignore[arg-type]
        check_weights(weights, expected)
        assert isinstance(weights.layers[0].qkv_weight, StackedMatrix)
        assert len(weights.layers[0].qkv_weight.parts) == 3
        assert weights.dtype == torch.bfloat16
        loads.append(progress)
    assert loads[0].fractions == sorted(loads[0].fractions)
    assert loads[0].fractions[-1] == 1.0
    size = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    assert re.fullmatch(r"(\S+) of \1 MB, \d+ MB/s, 0 s left", loads[0].details[-1])
    assert f"of {size / 1e6:.0f} MB" in loads[0].details[0]
    assert loads[1].fractions == []


def test_the_cache_holds_no_weights_of_a_file(tmp_path: Path) -> None:
    path, expected = gguf_of(tmp_path, "Q8_0")
    directory = resolve_model(path)
    own = [inside for inside in directory.iterdir() if not inside.is_symlink()]
    assert sum(inside.stat().st_size for inside in own) < path.stat().st_size / 2
    weights = target_of(plan_of(path, weights="bf16")).weights
    embedding = expected["model.embed_tokens.weight"].bfloat16()
    assert torch.equal(as_tensor(weights.embedding_VE, torch.bfloat16), embedding)


def test_a_digest_tells_a_file_from_others(tmp_path: Path) -> None:
    """What heads and captured states are trained on is known by all weights."""
    digests = set()
    for number, (kind, others) in enumerate([("Q8_0", NOTHING), ("Q8_0", K_M), ("Q4_K", K_M)]):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        path, _ = gguf_of(folder, kind, others)
        checkpoint = Checkpoint(resolve_model(path))
        digests.add(weights_digest(checkpoint))
        assert weights_digest(checkpoint) in digests
    assert len(digests) == 3


def test_drafts_do_not_change_the_text(tmp_path: Path) -> None:
    path, _ = gguf_of(tmp_path, "Q4_K", K_M)
    params = [SamplingParams(max_tokens=24, temperature=heat, seed=5) for heat in (0.0, 0.8)]
    texts = {
        drafter: [
            LLM.load(str(path), drafter=drafter).generate("The ferry. The ferry", one)[0].token_ids
            for one in params
        ]
        for drafter in ("none", "suffix", "lookahead")
    }
    assert texts["none"] == texts["suffix"] == texts["lookahead"]


# ----------------------------------------------------------------------------------- what is asked


def test_formats_that_cannot_be_kept_are_said(tmp_path: Path) -> None:
    path, _ = gguf_of(tmp_path, "Q8_0", {"o_proj": "F16"})
    plan = plan_of(path)
    assert plan.weights == "bfloat16"
    assert any("o_proj.weight is stored as F16" in note for note in plan.notes)
    with pytest.raises(ConfigError, match=r"o_proj\.weight is stored as F16"):
        plan_of(path, weights="file")


def test_plain_files_have_no_formats_to_keep(tmp_path: Path) -> None:
    path, _ = gguf_of(tmp_path, "F16")
    assert plan_of(path).weights == "bfloat16"
    assert plan_of(path).notes == ()
    with pytest.raises(ConfigError, match="its weights are plain floats"):
        plan_of(path, weights="file")


def test_heads_that_fill_no_groups_are_refused(tmp_path: Path) -> None:
    config = shape_of(num_attention_heads=32, num_key_value_heads=1, head_dim=8)
    stored, _ = stored_tensors(config, "Q5_0", {"v_proj": "Q6_K"})
    more = {"llama__attention__key_length": 8, "llama__attention__value_length": 8}
    path = write_gguf(tmp_path / "model.gguf", metadata_of(config, **more), stored)
    with pytest.raises(ConfigError, match="16"):
        load_target(plan_of(path))


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    config = shape_of()
    stored, _ = stored_tensors(config, "Q6_K")
    broken = [
        (name, Stored(one.kind, one.dimensions, one.content[:-2] + b"\x00\x7e"))
        if name == "blk.1.ffn_down.weight"
        else (name, one)
        for name, one in stored
    ]
    plan = plan_of(write_gguf(tmp_path / "model.gguf", metadata_of(config), broken))
    with pytest.raises(ModelLoadError, match="Q6_K weights is no number"):
        load_target(plan)


def test_doctor_says_what_a_file_holds(tmp_path: Path) -> None:
    from foredraft.cli.doctor import examine

    path, _ = gguf_of(tmp_path, "Q4_K", K_M)
    report = examine(LoadOptions(model=str(path)), 100)
    target = report["models"]["target"]
    assert target["family"] == "llama"
    assert target["formats"] == ["Q4_K", "Q6_K"]
    assert target["weights"] == "file"
    assert target["is_gguf"]
    assert target["most_tokens_per_s"] > 0
    eight, _ = gguf_of(tmp_path, "Q8_0")
    found = examine(LoadOptions(model=str(eight)), 100)["models"]["target"]
    assert found["in_4_bits"]["read_bytes"] < 0.7 * found["read_bytes"]
    four, _ = gguf_of(tmp_path, "Q4_0")
    assert examine(LoadOptions(model=str(four)), 100)["models"]["target"]["in_4_bits"] is None


# ------------------------------------------------------------------------------------- split files


def split(folder: Path, config: LlamaConfig, count: int) -> tuple[list[Path], dict]:  # type: ignore[type-arg]
    stored, weights = stored_tensors(config, "Q8_0")
    paths = []
    for number in range(count):
        said = {"split.no": Typed(2, number), "split.count": Typed(2, count)}
        metadata = said if number else metadata_of(config) | said
        path = folder / f"model-{number + 1:05}-of-{count:05}.gguf"
        paths.append(write_gguf(path, metadata, stored[number::count]))
    return paths, weights


@pytest.mark.parametrize("named", ["the first", "another", "the folder"])
def test_a_split_file_is_one_model(tmp_path: Path, named: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    paths, expected = split(folder, shape_of(), 3)
    name = {"the first": paths[0], "another": paths[2], "the folder": folder}[named]
    check_weights(target_of(plan_of(name)).weights, expected)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths, _ = split(tmp_path, shape_of(), 3)
    paths[1].unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.gguf is missing"):
        plan_of(paths[0])


def test_parts_of_two_sets_are_not_joined(tmp_path: Path) -> None:
    paths, _ = split(tmp_path, shape_of(), 3)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ModelLoadError, match=r"part 2 \(from 0\) of 3, and is named as part 1"):
        plan_of(paths[0])


def test_which_of_several_files_is_meant_is_not_guessed(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    first, _ = gguf_of(folder, "Q8_0")
    (folder / "other.gguf").write_bytes(first.read_bytes())
    with pytest.raises(ConfigError, match=r"several GGUF files \(model.gguf, other.gguf\)"):
        plan_of(folder)


# -------------------------------------------------------------------------- a directory from others


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (0, "../model.gguf", "not a gguf file of its own directory"),
        (1, [100, 33], "Q8_0 of shape"),
        (1, [-1, 64], "Q8_0 of shape"),
        (1, [1.5, 64], "Q8_0 of shape"),
        (1, [], "IndexError"),
        (2, "IQ1_S", "KeyError"),
        (4, 7, "and 7 heads"),
        (3, 1 << 40, "lies beyond its end"),
        (3, -1, "lies beyond its end"),
    ],
)
def test_an_index_leads_to_no_other_bytes(
    tmp_path: Path, field: int, value: object, message: str
) -> None:
    directory = resolve_model(gguf_of(tmp_path, "Q8_0")[0])
    index = json.loads((directory / GGUF_INDEX).read_text())
    index["model.embed_tokens.weight"][field] = value
    (directory / GGUF_INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=message):
        Checkpoint(directory)


def test_every_format_has_a_form() -> None:
    assert FORMS.keys() & CODES.keys() == {k.name for k in KINDS.values() if k.unpack is not None}
