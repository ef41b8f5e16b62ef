"""A tiny target for all tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.train.target import TrainingTarget
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint
from tests.train.helpers import training_target


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("train") / "tiny"
    save_checkpoint(directory, NATIVE_CONFIGS["llama-tied"]())
    return directory


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("train") / "other"
    save_checkpoint(directory, NATIVE_CONFIGS["llama-tied"](), seed=1)
    return directory


@pytest.fixture
def target(checkpoint: Path) -> TrainingTarget:
    return training_target(checkpoint)
