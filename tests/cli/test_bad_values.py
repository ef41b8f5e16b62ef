"""Every command with values that cannot be used: one clear line each, and exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.cli import main as main_module
from foredraft.cli.main import main

MODEL_VALUES = [
    ("--threads", "100000", "this machine has"),
    ("--threads", "0", "threads is 0"),
    ("--threads", "many", "Invalid value"),
    ("--device", "cpu:abc", "device"),
    ("--device", "gpu", "unknown device"),
    ("--dtype", "float23", "did you mean 'float32'"),
    ("--dtype", "bfloat", "did you mean 'bfloat16'"),
    ("--dtype", "fp16", "nothing is computed in float16"),
    ("--dtype", "fp32", "did you mean 'float32'"),
    ("--weights", "int3", "unknown weights"),
    ("--set", "backend=nativ", "did you mean 'native'"),
    ("--device", "gpu", "did you mean 'cuda'"),
    ("--max-context", "1", "max_context is 1"),
    ("--max-context", "-5", "max_context is -5"),
    ("--model", "x" * 5000, "no file can have such a name"),
    ("--model", "./" + "y" * 300, "no file can have such a name"),
    ("--model", "", "model is ''"),
]
DRAFT_VALUES = [
    ("--drafter", "x" * 200, "unknown drafter"),
    ("--drafter", "ngrm", "did you mean 'ngram'"),
    ("--drafter", "x" * 5000, "no file can have such a name"),
    ("--num-draft-tokens", "-1", "num_draft_tokens is -1"),
    ("--drafter-option", "no equals sign", "is not NAME=VALUE"),
    ("--drafter-option", "shared_dir=/proc/no", "shared_dir"),
    ("--draft-model", "z" * 5000, "no file can have such a name"),
]
SAMPLING_VALUES = [
    ("--temperature", "-1", "temperature is -1"),
    ("--temperature", "nan", "temperature must be a finite number"),
    ("--top-k", "-1", "top_k is -1"),
    ("--top-p", "0", "top_p is 0"),
    ("--set", "max_tokens=3", "it is the option --max-tokens"),
    ("--set", "min_p=2", "min_p is 2"),
    ("--seed", "-1", "seed is -1"),
    ("--seed", "99999999999999999999999", "seed is"),
    ("--max-tokens", "0", "max_tokens is 0"),
    ("--set", "repetition_penalty=0", "repetition_penalty is 0.0; it must be between 0.01 and 100"),
    ("--set", "presence-penalty=3", "presence_penalty is 3"),
    ("--set", "frequency_penalty=nan", "frequency_penalty must be a finite number"),
    ("--set", "min_tokens=9999", "min_tokens is 9999"),
]
FORM_VALUES = [
    ("--stop", "", "non-empty"),
    ("--stop", "a" * 70000, "stop holds"),
    ("--coupling", "seded", "did you mean 'seeded'"),
    ("--json-schema", "/no/such/schema.json", "cannot be read"),
    ("--json-schema", __file__, "test_bad_values.py: the JSON schema is no JSON"),
    ("--set", "min_b=2", "did you mean 'min_p'"),
    ("--set", "min_p", "is not NAME=VALUE"),
    ("--cache-dtype", "int8", "write --set cache_dtype=…"),
]
COMMANDS = {
    ("generate", "Hi"): [
        *MODEL_VALUES,
        *DRAFT_VALUES,
        *SAMPLING_VALUES,
        *FORM_VALUES,
    ],
    ("chat",): [*MODEL_VALUES, *DRAFT_VALUES, *SAMPLING_VALUES],
    ("doctor",): [
        *MODEL_VALUES,
        ("--tokens", "-5", "Invalid value"),
        ("--tokens", "0", "Invalid value"),
    ],
    ("demo",): [
        *MODEL_VALUES,
        *DRAFT_VALUES,
        ("--seed", "-1", "seed is -1"),
        ("--set", "coupling=drawn", "there is no such setting"),  # its texts would differ
    ],
    ("serve",): [
        *MODEL_VALUES,
        *DRAFT_VALUES,
        ("--set", "max_step_tokens=0", "max_step_tokens is 0"),
        ("--max-batch-size", "0", "max_batch_size is 0"),
        ("--port", "99999", "port is 99999"),
        ("--host", "0.0.0.0", "--api-key-file"),
        ("--otlp-traces-endpoint", "collector:4317", "--otlp-traces-endpoint is 'collector:4317'"),
        ("--per-request-spec-decode-metrics", "some", "'summary'"),
    ],
    ("run-batch", "no-such-file.jsonl"): [
        ("--set", "max_step_tokens=many", "--set max_step_tokens is 'many'")
    ],
    ("drafters", "index", "no-such-file", "--output", "out"): [("--model", "", "no such file")],
    ("drafters", "index", "n" * 5000, "--output", "out"): [("--model", "x", "File name too long")],
    ("drafters", "index", __file__, "--output", "o" * 5000): [
        ("--model", "x", "File name too long")
    ],
}
CASES = [(command, *value) for command, values in COMMANDS.items() for value in values]


@pytest.mark.parametrize(
    ("command", "option", "value", "message"),
    CASES,
    ids=[f"{' '.join(c)[:20]} {o} {v[:12]}" for c, o, v, _ in CASES],
)
def test_a_bad_value_is_one_clear_line(
    command: tuple[str, ...],
    option: str,
    value: str,
    message: str,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = () if option == "--model" else ("--model", str(checkpoint))
    monkeypatch.setattr("sys.argv", ["foredraft", *command, *model, option, value])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err
    assert left.value.code == 2, said
    assert message in said
    assert "Traceback" not in said
    if said.startswith("error: "):
        assert said.count("\n") == 1
        assert len(said) < 600


def test_a_full_disk_behind_the_output_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(main_module, "app", fail)
    monkeypatch.setattr(main_module, "_drop_output", lambda: None)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert "No space left on device" in capsys.readouterr().err
