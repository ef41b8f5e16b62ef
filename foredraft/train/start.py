"""Begin with what another head of the same kind has learnt, on other text or for other tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.core.errors import ConfigError
from foredraft.drafters.heads.base import HeadModule


@torch.no_grad()
def take_over(module: HeadModule, older: HeadModule) -> None:
    """Copy what both have: all weights, and the output rows of the tokens that both can name.

    Other rows stay as they are: a new head has the target's own there.

    Raises:
        ConfigError: the heads are of different kinds or sizes.
    """
    names = dict(older.named_parameters())
    if type(module) is not type(older) or names.keys() != dict(module.named_parameters()).keys():
        raise ConfigError(
            f"a {module.kind} head cannot start from this {older.kind} head: their layers differ"
        )
    here, there = _shared_rows(module, older)
    for name, parameter in module.named_parameters():
        known = names[name].to(parameter.device)
        if known.shape == parameter.shape and not _names_tokens(module, parameter):
            parameter.copy_(known)
        elif known.shape[1:] == parameter.shape[1:]:
            parameter[here] = known[there]
        else:
            raise ConfigError(
                f"{name} is {[*parameter.shape]} here and {[*known.shape]} in the head to start "
                "from: train with its options"
            )


def _names_tokens(module: HeadModule, parameter: Tensor) -> bool:
    ids_R = module.output_ids_R
    return ids_R is not None and parameter.ndim == 2 and len(parameter) == len(ids_R)


def _shared_rows(module: HeadModule, older: HeadModule) -> tuple[Tensor, Tensor]:
    """Output rows of the tokens that both name, in each."""
    ids = [_ids(module), _ids(older)]
    shared = torch.tensor(sorted(set(ids[0]) & set(ids[1])), dtype=torch.int64)
    found = []
    for tokens in ids:
        place = {token: row for row, token in enumerate(tokens)}
        found.append(torch.tensor([place[int(token)] for token in shared], dtype=torch.int64))
    return found[0], found[1]


def _ids(module: HeadModule) -> list[int]:
    ids_R = module.output_ids_R
    return list(range(module.shape.vocab_size)) if ids_R is None else ids_R.tolist()
