"""Multi-token prediction: decoder layers carry the target's last state on, token by token.

DeepSeek-V3, arXiv 2412.19437: a head for each depth, which reads what the head before it made of
the same token, and one token more of the text. Each has norms of that state and of the token's
embedding, a projection of both, a decoder layer and a norm; the output rows are shared. The first
state is what the target's head reads. Behind the last head its own output takes the state's place
(FastMTP, arXiv 2509.18362), so one head drafts as far as several do.

Shape legend: B texts, L tokens, E hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.drafters.heads.base import (
    HeadModule,
    HeadOption,
    HeadSource,
    Prediction,
    TextBatch,
    unrolled,
)
from foredraft.drafters.heads.layers import (
    AnchoredAttention,
    Joined,
    JoinedTokens,
    LlamaLayer,
    RMSNorm,
    head_weights,
)
from foredraft.drafters.heads.published import (
    CheckpointTensors,
    Sizes,
    check_fits,
    fill,
    final_norm,
    layer_names,
    under_our_names,
)
from foredraft.drafters.heads.steps import StepRunner, stepwise_drafter
from foredraft.models.base import HeadRow, HeadTarget, ModelShape
from foredraft.models.files.json_files import parse_fields, read_json

RETURNS = ("normed", "plain")


class MtpHead(nn.Module):
    """Weights of one depth.

    Args:
        shape: of the target.
        returns: see `MtpModule`.
    """

    def __init__(self, shape: ModelShape, returns: str) -> None:
        super().__init__()
        self.returns = returns
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.embedding_norm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = LlamaLayer(shape)
        self.norm = RMSNorm(hidden, eps)

    @torch.no_grad()
    def start(self, source: HeadSource) -> None:
        """Start from the target's last layer and norm, passing the state through."""
        size = source.shape.hidden_size
        self.norm.weight.copy_(source.final_norm())
        self.layer.load_state_dict(dict(source.layer(-1)))
        self.join.weight.mul_(0.1)
        self.join.weight[:, size:] += torch.eye(size)

    def inputs(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Inputs of the layer; [..., E].

        Args:
            embeddings: of the token after the last one that each state covers.
            states: from `MtpModule.first_state`, of later heads from `next_state`.
        """
        normed = self.embedding_norm(embeddings.to(states.dtype)), self.hidden_norm(states)
        joined: Tensor = self.join(torch.cat(normed, -1))
        return joined

    def next_state(self, x: Tensor, normed: Tensor) -> Tensor:
        """State for the next head: the layer's output or its norm."""
        return normed if self.returns == "normed" else x


class MtpModule(HeadModule):
    """See the module docstring.

    Args:
        returns: output that replaces the target's state after the anchor: the layer's output behind
            the last norm ("normed") or before it ("plain").
        heads: how many.
    """

    kind = "mtp"
    OPTIONS: ClassVar = {
        "returns": HeadOption(
            "output that replaces the target's state after the anchor (normed)", "normed", RETURNS
        ),
        "heads": HeadOption("one for each depth, the last for all further ones too (1)", 1),
    }

    def __init__(self, shape: ModelShape, num_rows: int | None, returns: str, heads: int) -> None:
        last = shape.num_hidden_layers - 1
        super().__init__(shape, (last,), num_rows=num_rows, returns=returns, heads=heads)
        self.target_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.heads = nn.ModuleList(MtpHead(shape, returns) for _ in range(heads))

    def take_layers(self, source: HeadSource) -> None:
        self.target_norm.weight.copy_(source.final_norm())
        for head in self.each_head():
            head.start(source)

    def each_head(self) -> list[MtpHead]:
        """The heads in the order of their depths."""
        return [cast(MtpHead, head) for head in self.heads]

    def first_state(self, hidden: Tensor) -> Tensor:
        """The last layer's output after the target's final norm: input of the LM head; [..., E]."""
        normed: Tensor = self.target_norm(hidden.to(self.output.dtype))
        return normed

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        heads = self.each_head()
        attentions = [AnchoredAttention(head.layer) for head in heads]

        def step(k: int, embeddings: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            at = min(k, len(heads)) - 1
            # A head's own entries are of the text, until it is used again.
            x = attentions[at].step(heads[at].inputs(embeddings, state), k - 1 - at)
            normed = heads[at].norm(x)
            return normed, heads[at].next_state(x, normed)

        state_BLE = self.first_state(batch.taps[self.taps[0]])
        return unrolled(batch, depth, self.output, state_BLE, step)

    def runner(self, target: HeadTarget) -> MtpRunner:
        return MtpRunner(self, target)


class _Head:
    """One head where the target runs it.

    Args:
        head: its weights.
        output_RE: the output rows.
        target: its target.
    """

    def __init__(self, head: MtpHead, output_RE: Tensor, target: HeadTarget) -> None:
        self._head, shape = head, head.layer.shape
        token, state = head.join.weight.chunk(2, 1)
        eps = shape.rms_norm_eps
        tokens = JoinedTokens(target, token * head.embedding_norm.weight, eps)
        self.inputs = Joined(target, [head.hidden_norm.weight], state, eps, tokens)
        weights = head_weights([head.layer], head.norm, output_RE, shape)
        self._runner = target.head_runner(weights)
        self.layers = self._runner.layers

    @torch.no_grad()
    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """States for the next head [T, E], and logits [N, R]."""
        x_TE, logits_NR = self._runner.run(rows, inputs_TE)
        return self._head.next_state(x_TE, self._head.norm(x_TE)), logits_NR


@dataclass(frozen=True)
class _End:
    """End of the text that was read for a slot.

    Attributes:
        num_tokens: tokens read since the request began.
        states_CE: states of the last of them, for its successors.
    """

    num_tokens: int
    states_CE: Tensor


@dataclass(frozen=True)
class _Part:
    """Nodes of a row that one head reads.

    Attributes:
        row: the row in the head's own numbering of entries.
        nodes: the new nodes, in the numbering of the run.
    """

    row: HeadRow
    nodes: Sequence[int]


class MtpRunner(StepRunner):
    """Makes the inputs of an `MtpModule`'s layers, which the target runs.

    Each token carries the states that its successors are read with: those of all heads but the
    last, or of the only one.
    """

    def __init__(self, module: MtpModule, target: HeadTarget) -> None:
        self._module = module.to(target.parts.device).eval()
        self._heads = [_Head(head, module.output, target) for head in module.each_head()]
        self._size, self._num_rows = module.shape.hidden_size, len(module.output)
        self._last = len(self._heads) - 1
        self._num_states = max(1, self._last)
        self._ends: dict[int, _End] = {}  # by slot
        self.layers = tuple(head.layers for head in self._heads)

    def begin(self, slot: int) -> None:
        self._ends.pop(slot, None)

    @torch.no_grad()
    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        """Inputs of the first head, and the tokens for the other heads; [T, E + 1]."""
        inputs_TE = self._heads[0].inputs([self._module.first_state(taps[0])], following)
        return _with_tokens(inputs_TE, following)

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        """The states that their parents carry, and the tokens; [N, C E + 1]."""
        return _with_tokens(states_NE, tokens)

    @torch.no_grad()
    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Run all heads; the states [T, C E] carried by each node, or by a text's last token."""
        run = self._run_nodes if rows[0].tree else self._run_text
        return run(rows, inputs_TE[:, :-1], inputs_TE[:, -1].int().tolist())

    def _run_text(
        self, rows: Sequence[HeadRow], inputs_TE: Tensor, tokens: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        counts = [row.num_text for row in rows]
        stops = [*accumulate(counts)]
        texts = [tokens[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
        states_TE, logits_NR = self._heads[0].run(rows, inputs_TE)
        made = [[*torch.split(states_TE, counts)]]
        for k in range(1, len(self._heads)):
            made.append(self._follow(k, rows, texts, made[-1]))
        along_TCE = states_TE.new_zeros(len(tokens), self._num_states, self._size)
        for i, row in enumerate(rows):
            for k, states in enumerate(made[: self._num_states]):
                if len(states[i]):
                    along_TCE[stops[i] - 1, k] = states[i][-1]
            read = row.num_text + self._num_read(row)
            self._ends[row.slot] = _End(read, along_TCE[stops[i] - 1])
        return along_TCE.flatten(1), logits_NR

    def _follow(
        self,
        k: int,
        rows: Sequence[HeadRow],
        texts: Sequence[Sequence[int]],
        made: Sequence[Tensor],
    ) -> list[Tensor]:
        """States [T, E] of head ``k`` (from 0), for each text, from those of the head before it."""
        states, runs, tokens = list[Tensor](), list[HeadRow](), list[int]()
        for row, text, made_TE in zip(rows, texts, made, strict=True):
            states_TE = made_TE[:-1]
            if self._num_read(row) >= k:  # else it has no entries yet
                states_TE = torch.cat((self._ends[row.slot].states_CE[k - 1 : k], states_TE))
            states.append(states_TE)
            if count := len(states_TE):
                start = row.start - min(self._num_read(row), k)
                runs.append(HeadRow(row.slot, start, count, num_wanted=0))
                tokens += text[-count:]
        if not runs:
            return states
        inputs_TE = self._heads[k].inputs([torch.cat(states)], tokens)
        made_TE, _ = self._heads[k].run(runs, inputs_TE)
        return [*torch.split(made_TE, [*map(len, states)])]

    def _num_read(self, row: HeadRow) -> int:
        end = self._ends.get(row.slot)
        return 0 if end is None else end.num_tokens

    def _run_nodes(
        self, rows: Sequence[HeadRow], inputs_NE: Tensor, tokens: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        states_NCE = inputs_NE.reshape(len(tokens), self._num_states, self._size)
        along_NCE = torch.zeros_like(states_NCE)
        logits_NR = inputs_NE.new_empty(len(tokens), self._num_rows)
        # Run the heads from last to first: if several read a node, the earliest head's output wins.
        for k in range(self._last, min(1, self._last) - 1, -1):
            parts = self._parts(rows, k)
            if not parts:
                continue
            nodes = [node for part in parts for node in part.nodes]
            said = [node for part in parts if part.row.num_wanted for node in part.nodes]
            states_NE = states_NCE[nodes, max(0, k - 1)]
            inputs = self._heads[k].inputs([states_NE], [tokens[node] for node in nodes])
            made_NE, said_NR = self._heads[k].run([part.row for part in parts], inputs)
            along_NCE[nodes, min(k, self._num_states - 1)] = made_NE
            logits_NR[said] = said_NR
        return along_NCE.flatten(1), logits_NR

    def _parts(self, rows: Sequence[HeadRow], k: int) -> list[_Part]:
        """Parts of the rows of which head ``k`` (from 0) reads any new nodes."""
        found, first = list[_Part](), 0
        for row in rows:
            part = _part(row, first, k, is_last=k == self._last)
            found += [part] if part.nodes else []
            first += row.num_text + len(row.tree) - row.num_known
        return found


def _part(row: HeadRow, first: int, k: int, is_last: bool) -> _Part:
    """The part of a row that head ``k`` (from 0) reads; its new nodes begin at ``first``."""
    tree, known = row.tree, row.num_known - row.num_text
    num_text = row.start + row.num_text - k  # the head's entries for the text
    depths = range(max(1, 1 - num_text), (len(tree) if is_last else k) + 1)
    read = [node for node, depth in enumerate(tree.depths) if depth in depths]
    new = [node for node in read if node >= known]
    says = any(tree.depths[node] >= k for node in new)
    shown = min(1, max(0, num_text))
    mine = HeadRow(
        row.slot,
        max(0, num_text - 1),
        shown,
        tree.subset(read),
        num_known=shown + len(read) - len(new),
        num_wanted=len(new) if says else 0,
    )
    return _Part(mine, [first + node - known for node in new])


def _with_tokens(states_TE: Tensor, tokens: Sequence[int]) -> Tensor:
    """Tokens as a last column: their numbers are whole in float32."""
    ids_T = torch.tensor(tokens, dtype=states_TE.dtype, device=states_TE.device)
    return torch.cat((states_TE, ids_T[:, None]), 1)


@dataclass(frozen=True)
class Layout:
    """How a family names and means its MTP weights.

    Attributes:
        family: for messages.
        prefix: of all names; its group, if it has one, is the module's number.
        layer: of the decoder layer's names, after the prefix.
        embedding_norm, hidden_norm, join, norm: names after the prefix.
        unused: names after the prefix of tensors that the target has anyway.
        hidden_first: the state comes before the embedding where they are joined.
        less_one: norms are stored less 1.
        returns: see `MtpModule`.
    """

    family: str
    prefix: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    join: str
    norm: str
    unused: tuple[str, ...] = ()
    hidden_first: bool = False
    less_one: bool = False
    returns: str = "normed"


LAYOUTS = (
    Layout(
        "DeepSeek-V3",
        r"model\.layers\.(\d+)\.",
        "",
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        unused=("embed_tokens.weight", "shared_head.head.weight"),
        returns="plain",
    ),
    Layout(
        "Qwen3-Next",
        r"mtp\.",
        "layers.0.",
        "pre_fc_norm_embedding.weight",
        "pre_fc_norm_hidden.weight",
        "fc.weight",
        "norm.weight",
        less_one=True,
    ),
    Layout(
        "MiMo",
        r"model\.mtp_layers\.(\d+)\.",
        "",
        "token_layernorm.weight",
        "hidden_layernorm.weight",
        "input_proj.weight",
        "final_layernorm.weight",
        hidden_first=True,
    ),
)

_ADVICE = "Train one: foredraft train mtp"
_COUNT = "num_nextn_predict_layers"


def read_native(directory: Path, target: HeadTarget) -> MtpModule:
    """The MTP heads that a checkpoint comes with.

    Args:
        target: its final norm and head are theirs too.

    Raises:
        ConfigError: there is none, or one that is not as a llama layer.
        ModelLoadError: the checkpoint is damaged, or does not hold as many as its config says.
    """
    path = directory / "config.json"
    config = read_json(path)
    shape = parse_fields(path, config, Sizes).shape
    check_fits(shape, target, f"the MTP layer in {directory}")
    weights: dict[str, Tensor] = {}
    tensors = CheckpointTensors(directory)
    layout, prefixes = _find(tensors.names, directory)
    _check_count(config, prefixes, directory)
    for number, prefix in enumerate(prefixes):
        found = _weights(layout, tensors.below(prefix, layout.unused), directory)
        weights |= {f"heads.{number}.{name}": weight for name, weight in found.items()}
    ids_V = torch.arange(shape.vocab_size)
    parts = target.parts
    norm_E = final_norm(parts, shape.rms_norm_eps)
    weights |= {"target_norm.weight": norm_E, "output": parts.head_rows(ids_V)}
    recipe = {"num_rows": None, "returns": layout.returns, "heads": len(prefixes)}
    with torch.device("meta"):
        module = MtpModule.from_config(shape, recipe)
    fill(module, weights, f"the MTP layer in {directory}")
    return module


def _find(names: Sequence[str], directory: Path) -> tuple[Layout, list[str]]:
    """The layout, and the prefix of each head's tensor names, by depth."""
    for layout in LAYOUTS:
        pattern = re.compile(f"({layout.prefix}){re.escape(layout.join)}$")
        found = [match for name in names if (match := pattern.match(name))]
        if found:
            found.sort(key=lambda match: int(match[2]) if match.re.groups > 1 else 0)
            return layout, [match[1] for match in found]
    families = ", ".join(layout.family for layout in LAYOUTS)
    raise ConfigError(
        f"{directory} holds no MTP layer under the names of {families}; train one: foredraft train "
        "mtp"
    )


def _check_count(config: Mapping[str, Any], prefixes: Sequence[str], directory: Path) -> None:
    """Refuse a missing head: each reads the output of the one before it."""
    said = config.get(_COUNT)
    if said is not None and said != len(prefixes):
        raise ModelLoadError(
            f"{directory / 'config.json'} says {_COUNT}={said!r:.20}, and the checkpoint holds "
            f"{len(prefixes)} ({', '.join(prefixes)}): copy all of its files"
        )


def _weights(layout: Layout, found: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Under the names of `MtpHead`."""
    names = {
        "embedding_norm.weight": (layout.embedding_norm,),
        "hidden_norm.weight": (layout.hidden_norm,),
        "join.weight": (layout.join,),
        "norm.weight": (layout.norm,),
        **layer_names(layout.layer),
    }
    what = f"the {layout.family} MTP layer in {directory}"
    weights = under_our_names(found, names, what, _ADVICE)
    if layout.less_one:
        weights |= {n: w.float() + 1.0 for n, w in weights.items() if n.endswith("norm.weight")}
    if layout.hidden_first:
        weights["join.weight"] = weights["join.weight"].roll(len(weights["join.weight"]), 1)
    return weights


DRAFTER = stepwise_drafter(
    MtpModule,
    summary="trained layers carry the target's last state on, token by token",
    num_draft_tokens=8,
    read=read_native,
)
