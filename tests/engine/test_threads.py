"""Several threads on one engine, and an interpreter that ends while a reply is under way."""

from __future__ import annotations

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foredraft.core.params import SamplingParams
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.engine.engine import Engine
from foredraft.models.native.model import EagerDecoder
from foredraft.models.native.target import NativeTarget
from tests.engine.helpers import counting_model, finish, generate, new_engine
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint

PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=25)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> NativeTarget:
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(directory, NATIVE_CONFIGS["llama"]())
    return NativeTarget.load(directory, new_decoder=EagerDecoder)


def read(streams: Engine, prompt: list[int], params: SamplingParams = PARAMS) -> tuple[int, ...]:
    events = list(streams.stream([prompt], params))
    assert events[-1].result is not None
    assert events[-1].result.error is None
    assert tuple(t for event in events for t in event.token_ids) == events[-1].result.token_ids
    return events[-1].result.token_ids


def test_threads_take_turns_and_each_gets_its_own_text(target: NativeTarget) -> None:
    prompts = [[i + 1, 2, 3, i + 1, 2] for i in range(12)]
    alone = [read(new_engine(target, new_decoder=None), prompt) for prompt in prompts]
    streams = new_engine(target, NgramDrafter(min_ngram_size=1), max_batch_size=3, new_decoder=None)
    for _ in range(3):
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda prompt: read(streams, prompt), prompts)) == alone
    assert target.cache.allocate() == 0
    target.cache.free(0)


def test_a_stream_closed_from_within_a_step_ends_after_it() -> None:
    """As the garbage collector does, which may run at any moment."""
    engine = new_engine(counting_model(), trace=lambda record: engine.cancel(0) and None)
    engine.submit([1], PARAMS)
    engine.step()
    assert not engine.has_work


def test_a_conversation_that_nobody_holds_gives_its_slot_back() -> None:
    target = counting_model()
    engine = new_engine(target)
    request_id = engine.submit([1, 2], PARAMS)
    finish(engine)
    assert not engine.is_live(request_id)
    gc.collect()
    generate(engine, [[3]], PARAMS)
    assert target.cache.slots == []


OPEN_STREAM = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.models.native.target import NativeTarget
from foredraft.options import LoadOptions

llm = LLM(NativeTarget.load(Path({model!r})), None, LoadOptions(drafter="ngram"))
events = llm.stream([1, 2, 3], SamplingParams(max_tokens=500))
other = llm.stream([4, 5], SamplingParams(max_tokens=500))
for stream in (events, other):
    next(stream)
{end}
"""


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("raise ValueError('over')", 1), ("sys.exit(3)", 3)]
)
def test_an_open_stream_does_not_abort_the_interpreter(
    end: str, status: int, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama"]())
    root = str(Path(__file__).parents[2])
    code = OPEN_STREAM.format(root=root, model=str(tmp_path), end=end)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr[-2000:]
    assert "Exception ignored" not in done.stderr
