"""OpenVINO GenAI on the same GGUF file, timed beside ours."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import ContenderRun
from foredraft.core.params import SamplingParams


class OpenVinoContender:
    """Greedy generation of OpenVINO GenAI. See `contenders.Contender`.

    Args:
        model: a GGUF file.
        max_context: most tokens of prompt and reply; its cache grows by itself.
        stop_ids: tokens that end a reply.
        draft_model: a GGUF file; None: it decodes plainly.
        draft_tokens: of a draft.
    """

    def __init__(
        self, model: str, max_context: int, threads: int, stop_ids: Collection[int],
        draft_model: str | None = None, draft_tokens: int = 0,
    ) -> None:  # fmt: skip
        import openvino_genai as genai

        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        self._config = genai.GenerationConfig(do_sample=False, stop_token_ids={*stop_ids})
        if draft_model:
            self._config.num_assistant_tokens = draft_tokens
            folder = converted(Path(draft_model))
            options["draft_model"] = genai.draft_model(str(folder), "CPU", **options)
        self._pipeline = genai.LLMPipeline(model, "CPU", **options)

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        import openvino
        import openvino_genai as genai

        self._config.max_new_tokens = params.max_tokens
        ids = np.array([prompt_ids], np.int64)
        asked = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        began = time.perf_counter()
        found = self._pipeline.generate(asked, self._config)
        total_s = time.perf_counter() - began
        first_s = found.perf_metrics.get_ttft().mean / 1e3
        return ContenderRun(tuple(found.tokens[0]), first_s, total_s, 1)


def converted(path: Path) -> Path:
    """The folder of a GGUF file in OpenVINO's own format, kept in its environment.

    Draft models are read in that format alone, and its reader of GGUF knows few formats of
    weights: they become 8 bits.
    """
    import openvino_genai as genai

    folder = Path(sys.prefix) / "models" / path.stem
    if not (folder / "openvino_tokenizer.xml").exists():  # which is written last
        folder.mkdir(parents=True, exist_ok=True)
        in_8_bits(path, folder / "q8_0.gguf")
        genai.LLMPipeline(str(folder / "q8_0.gguf"), "CPU", enable_save_ov_model=True)
    return folder


def in_8_bits(path: Path, into: Path) -> None:
    """Write a GGUF file once more, quantised weights as Q8_0 and all else as it is."""
    import gguf

    read = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(into, read.fields["general.architecture"].contents())
    for name, field in read.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    eight, floats = gguf.GGMLQuantizationType.Q8_0, (gguf.GGMLQuantizationType.F32,)
    for tensor in read.tensors:
        if tensor.tensor_type in floats:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, eight), raw_dtype=eight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
