"""`model.generate(custom_generate=foredraft.custom_generate)` against `model.generate` itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import foredraft
from foredraft.core.errors import CapabilityError, ConfigError, VocabularyMismatchError
from foredraft.hf_generate import _read_processors
from tests.core.reference import logits_to_probs
from tests.models.checkpoints import NATIVE_CONFIGS, VOCAB_SIZE, tiny_model
from tests.models.encoder_decoders import CONFIGS as ENCODER_DECODERS
from tests.models.encoder_decoders import tiny

WINDOW = 16
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": NATIVE_CONFIGS["llama"],
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=2,
    ),
    "gemma2-window": lambda: transformers.Gemma2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=WINDOW,
        eos_token_id=2,
        pad_token_id=2,
        bos_token_id=0,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def any_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(CONFIGS[request.param]())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(CONFIGS["llama"]())


@pytest.fixture(scope="module")
def draft_model() -> PreTrainedModel:
    """The model itself with a little noise: it agrees often, not always."""
    twin = tiny_model(CONFIGS["llama"]())
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    return twin


@pytest.fixture(scope="module")
def encoder_decoder() -> Any:
    return tiny()


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB_SIZE) for _ in range(length)]


def one_row(length: int = 12) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([prompt(length)])}


def padded_rows(*lengths: int) -> dict[str, Tensor]:
    width = max(lengths)
    pads = [width - length for length in lengths]
    return {
        "input_ids": torch.tensor([[2] * pad + prompt(width - pad, seed=pad) for pad in pads]),
        "attention_mask": torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads]),
    }


def speculate(model: Any, inputs: dict[str, Tensor] | None = None, **options: Any) -> Any:
    """The result of generate with us, for one row where no inputs are given."""
    ours = {"custom_generate": foredraft.custom_generate}
    return model.generate(**(inputs or one_row()), **ours, **options)


def both(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> tuple[Any, Any]:
    """The results of generate without us and with us."""
    own = {"drafter", "draft_model", "num_draft_tokens", "drafter_options", "coupling"}
    own |= {"source_ids"}
    plain = {name: value for name, value in options.items() if name not in own}
    return (
        model.generate(**inputs, **plain),
        speculate(model, inputs, **options),
    )


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 6])
def test_greedy_text_is_that_of_generate(any_model: PreTrainedModel, num_draft_tokens: int) -> None:
    expected, actual = both(
        any_model, one_row(), max_new_tokens=60, num_draft_tokens=num_draft_tokens
    )
    assert torch.equal(actual, expected)


def test_left_padded_rows_are_those_of_generate(any_model: PreTrainedModel) -> None:
    expected, actual = both(any_model, padded_rows(3, 12, 7), max_new_tokens=30)
    assert torch.equal(actual, expected)


def test_rows_that_end_early_are_padded(model: PreTrainedModel) -> None:
    inputs = padded_rows(3, 12, 7)
    plain = model.generate(**inputs, max_new_tokens=30)
    ends = sorted({int(plain[0, 20]), int(plain[1, 25])})
    expected, actual = both(
        model, inputs, max_new_tokens=30, eos_token_id=ends, pad_token_id=1, drafter="ngram"
    )
    assert torch.equal(actual, expected)
    assert (actual == 1).any()


def test_max_length_and_defaults_of_the_model_count(model: PreTrainedModel) -> None:
    expected, actual = both(model, one_row(), max_length=25)
    assert actual.shape == (1, 25)
    assert torch.equal(actual, expected)
    expected, actual = both(model, one_row())
    assert torch.equal(actual, expected)


def test_a_draft_model_changes_nothing_but_the_steps(
    model: PreTrainedModel, draft_model: PreTrainedModel
) -> None:
    expected, actual = both(
        model,
        padded_rows(5, 9),
        max_new_tokens=40,
        draft_model=draft_model,
        num_draft_tokens=3,
        return_dict_in_generate=True,
    )
    assert torch.equal(actual.sequences, expected.sequences)
    for stats in actual.speculation:
        assert stats.committed == 40
        assert stats.accepted > 0
        assert stats.steps < 40


def test_generation_goes_on_past_the_context_of_the_config() -> None:
    config = CONFIGS["llama"]()
    config.max_position_embeddings = 32
    expected, actual = both(tiny_model(config), one_row(), max_new_tokens=40)
    assert torch.equal(actual, expected)


# Sampling


def test_torch_seeds_make_samples_repeatable(model: PreTrainedModel) -> None:
    def sample(seed: int, **options: Any) -> Any:
        torch.manual_seed(seed)
        return speculate(model, max_new_tokens=20, do_sample=True, **options)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    assert torch.equal(sample(1, drafter="ngram"), sample(1, drafter="none"))
    several = sample(1, num_return_sequences=3)
    assert len({tuple(row.tolist()) for row in several}) == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 0},
        {"top_k": 7, "top_p": 0.8},
        {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"top_k": 0, "min_p": 0.1, "renormalize_logits": None},
    ],
)
def test_the_distribution_is_the_one_generate_samples_from(
    model: PreTrainedModel, options: dict[str, Any]
) -> None:
    seen: dict[str, Any] = {}

    def record(model: Any, input_ids: Tensor, logits_processor: Any, **rest: Any) -> Tensor:
        seen["processors"] = logits_processor
        return input_ids

    model.generate(**one_row(), max_new_tokens=1, do_sample=True, custom_generate=record, **options)
    logits = 2.5 * torch.randn(50, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    expected = seen["processors"](torch.zeros(50, 1, dtype=torch.long), logits.clone()).softmax(-1)
    params, _ = _read_processors(seen["processors"], do_sample=True)
    for row in range(50):
        torch.testing.assert_close(logits_to_probs(logits[row], params), expected[row])


def test_a_warper_of_the_callers_own_counts(model: PreTrainedModel) -> None:
    def sample(**options: Any) -> Any:
        torch.manual_seed(1)
        return speculate(model, max_new_tokens=20, do_sample=True, **options)

    colder = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(0.4)])
    assert torch.equal(sample(logits_processor=colder), sample(temperature=0.4))
    with pytest.raises(ConfigError, match="logits processors in the order"):
        sample(temperature=0.9, logits_processor=colder)  # generate would apply both


# Output


class RecordingStreamer:
    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.shapes.append(tuple(value.shape))
        self.tokens.extend(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_sees_what_it_sees_from_generate(model: PreTrainedModel) -> None:
    theirs, ours = RecordingStreamer(), RecordingStreamer()
    model.generate(**one_row(), max_new_tokens=20, streamer=theirs)
    speculate(model, max_new_tokens=20, token_streamer=ours)
    assert ours.tokens == theirs.tokens
    assert ours.shapes == theirs.shapes
    assert ours.ended


def test_a_streamer_for_several_rows_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="a streamer shows one row, and there are 2"):
        speculate(model, padded_rows(3, 4), max_new_tokens=3, token_streamer=RecordingStreamer())


# Encoder-decoders


def sources(*lengths: int) -> dict[str, Tensor]:
    """Padded on the right, as tokenizers of encoder-decoders do."""
    padded = padded_rows(*lengths)
    return {name: tensor.flip(1) for name, tensor in padded.items()}


@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_encoder_decoders_write_what_generate_writes(kind: str) -> None:
    inputs, model = sources(9, 14, 5), tiny(kind)
    options = {"max_new_tokens": 20, "source_ids": inputs["input_ids"], "num_draft_tokens": 4}
    expected, actual = both(model, inputs, drafter="prediction", **options)
    assert torch.equal(actual, expected)
    del options["source_ids"]
    assert torch.equal(both(model, inputs, **options)[1], expected)


def test_an_encoder_decoder_drafts_for_another(encoder_decoder: Any) -> None:
    inputs = sources(9)
    expected, output = both(
        encoder_decoder,
        inputs,
        max_new_tokens=20,
        source_ids=inputs["input_ids"],
        draft_model=encoder_decoder,
        num_draft_tokens=4,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, expected.sequences)
    (stats,) = output.speculation
    assert stats.accepted > 10
    with pytest.raises(ConfigError, match="as source_ids"):
        both(encoder_decoder, inputs, max_new_tokens=4, draft_model=encoder_decoder)


def test_samples_of_an_encoder_decoder_do_not_depend_on_drafts(encoder_decoder: Any) -> None:
    inputs = sources(9, 6)
    texts = []
    for drafter in ("none", "prediction", "suffix"):
        torch.manual_seed(3)
        options = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "drafter": drafter}
        more = {"source_ids": inputs["input_ids"], "max_new_tokens": 12}
        texts.append(speculate(encoder_decoder, inputs, **options, **more))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert len(texts[0].unique(dim=0)) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"forced_bos_token_id": 21},
        {"forced_eos_token_id": 9},
        {"suppress_tokens": [*range(3, 60)]},
        {"begin_suppress_tokens": [7]},  # that is what it would begin with
        {"forced_bos_token_id": 21, "begin_suppress_tokens": [*range(3, 200)]},
    ],
    ids=lambda options: "+".join(options),
)
def test_forced_and_suppressed_tokens_are_those_of_generate(
    encoder_decoder: Any, options: dict[str, Any]
) -> None:
    free = encoder_decoder.generate(**sources(9), max_new_tokens=12)
    expected, actual = both(encoder_decoder, sources(9), max_new_tokens=12, **options)
    assert torch.equal(actual, expected)
    assert not torch.equal(expected, free)


def test_beams_are_refused_by_name(encoder_decoder: Any) -> None:
    with pytest.raises(ConfigError, match="num_beams=4; beams are neither the likeliest token nor"):
        both(encoder_decoder, sources(9), num_beams=4, max_new_tokens=4)
    with pytest.raises(ConfigError, match="source_ids have shape"):
        both(encoder_decoder, sources(9), source_ids=torch.ones(1, 4), max_new_tokens=4)


# Refusals


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"repetition_penalty": 1.2}, "the logits processor RepetitionPenalty"),
        ({"suppress_tokens": [4]}, "the logits processor SuppressTokens"),
        ({"do_sample": True, "typical_p": 0.5}, "the logits processor Typical"),
        ({"max_time": 5.0}, "the stopping criterion MaxTimeCriteria"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache": transformers.DynamicCache()}, "cache of your own"),
        ({"position_ids": torch.arange(12)[None] + 3}, "position_ids of your own"),
        ({"inputs_embeds": torch.zeros(1, 12, 64)}, "'inputs_embeds'"),
        (
            {"logits_processor": [transformers.TopKLogitsWarper(3)]},
            "the logits processor TopKLogitsWarper",
        ),
        (
            {
                "do_sample": True,
                "logits_processor": [transformers.TopPLogitsWarper(0.5, min_tokens_to_keep=2)],
            },
            "the logits processor TopPLogitsWarper",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    model: PreTrainedModel, options: dict[str, Any], named: str
) -> None:
    if "logits_processor" in options:
        own = transformers.LogitsProcessorList(options["logits_processor"])
        options = {**options, "logits_processor": own}
    with pytest.raises(ConfigError, match="does not implement") as refused:
        speculate(model, max_new_tokens=4, **options)
    assert named in str(refused.value)


def test_padding_on_the_right_is_refused(model: PreTrainedModel) -> None:
    inputs = padded_rows(3, 6)
    flipped = {name: tensor.flip(1) for name, tensor in inputs.items()}
    with pytest.raises(ConfigError, match="padding on the left"):
        speculate(model, flipped, max_new_tokens=4)


def test_mistyped_options_name_the_nearest(model: PreTrainedModel) -> None:
    def generate(**options: Any) -> None:
        speculate(model, max_new_tokens=4, **options)

    with pytest.raises(ConfigError, match="did you mean 'ngram'"):
        generate(drafter="n-grm")
    with pytest.raises(ConfigError, match="num_draft_tokens is -1"):
        generate(num_draft_tokens=-1)
    with pytest.raises(ConfigError, match="needs a draft model"):
        generate(drafter="draft_model")
    with pytest.raises(ValueError, match="num_draft_tokns"):  # by transformers
        generate(num_draft_tokns=3)


def test_models_whose_past_cannot_be_copied_are_refused() -> None:
    config = transformers.RwkvConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2)
    with pytest.raises(CapabilityError, match="a rejected token cannot be taken out"):
        speculate(tiny_model(config), max_new_tokens=4)


def test_a_draft_model_of_another_vocabulary_is_refused(model: PreTrainedModel) -> None:
    config = CONFIGS["gpt2"]()
    config.vocab_size = VOCAB_SIZE + 1
    with pytest.raises(VocabularyMismatchError, match="301"):
        speculate(model, max_new_tokens=4, draft_model=tiny_model(config))


@pytest.mark.real_model
def test_smollm2_greedy_text_is_that_of_generate() -> None:
    from foredraft.models.files.store import resolve_model

    directory = resolve_model("smollm2-135m-instruct")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    passage = "The bridge opened in 1932. It carries two roads and a footpath across the bay."
    inputs = tokenizer(
        [f"{passage} Say it again: {passage[:20]}", "A list of three fruits: apples,"],
        return_tensors="pt",
        padding=True,
    )
    expected, actual = both(model, dict(inputs), max_new_tokens=12, do_sample=False)
    assert torch.equal(actual, expected)
