"""The tensors of a family and ours: their names, which rows each of them has, and what its numbers
mean."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from configurator import UserError, show
from hub.families import FAMILIES, GATED, read_fla, read_transformers
from model import GPTConfig
from ops.fast import at_least_float32


class Part(NamedTuple):
    """Tensors of theirs and of ours that have the same rows, in another order."""

    theirs: dict[str, int]  # {name: number of rows}; 0 where a single tensor keeps its rows
    ours: dict[str, int]
    order: torch.Tensor | None  # of each of their rows, the number of ours; None: the same
    translation: tuple[Callable, Callable]  # of the numbers: theirs to ours, ours to theirs

    def to_ours(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.order is not None:
            # unflatten is for its error where one has another number of rows
            weights = [
                weight.unflatten(0, (n,))
                for weight, n in zip(weights, self.theirs.values(), strict=True)
            ]
            weights = torch.cat(weights)[self.order.argsort()].split([*self.ours.values()])
        return list(map(self.translation[0], weights))

    def to_theirs(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        weights = list(map(self.translation[1], weights))
        return (
            weights
            if self.order is None
            else torch.cat(weights)[self.order].split([*self.theirs.values()])
        )


def parts_of(config: GPTConfig, family: str, names: Iterable[str]) -> Iterator[Part]:
    """Yields every Part of the model, each tensor in one of them. names: those of our tensors."""
    layers, blocks_there, shared = config.layers(), FAMILIES[family].blocks, {}
    for i, (mixer, gate) in enumerate(layers):
        for theirs, ours, sizes in shared_rows(config, family, mixer, gate):
            blocks = "".join(ours.values())
            of_blocks = [sizes[block] for block in blocks]
            rows = dict(zip(blocks, torch.arange(sum(of_blocks)).split(of_blocks), strict=True))
            order = [
                torch.cat(
                    [rows[block].unflatten(0, (groups, -1)) for block in blocks], dim=1
                ).flatten()
                for groups, blocks in theirs.values()
            ]
            for kind in ("weight", "bias"):
                there = {
                    f"{blocks_there}.{i}.{name}.{kind}": len(x)
                    for name, x in zip(theirs, order, strict=True)
                }
                here = {
                    f"blocks.{i}.{name}.{kind}": sum(sizes[x] for x in blocks)
                    for name, blocks in ours.items()
                }
                shared |= dict.fromkeys(here, (there, here, torch.cat(order)))
    for name in names:
        theirs = their_name(name, config, family, is_shared=name in shared)
        there, here, order = shared.get(name, ({theirs: 0}, {name: 0}, None))
        if name == next(iter(here)):  # the others come with the first
            yield Part(there, here, order, translation(name, family, config.block_size))


def their_name(name: str, config: GPTConfig, family: str, is_shared: bool) -> str:
    """What a tensor of ours is called there. Raises UserError for one that the family does not
    have.

    is_shared: its rows are shared out otherwise, under other names: the name is then returned as it
    is.
    """
    about = FAMILIES[family]
    layer, module, kind = re.fullmatch(
        r"(?:blocks\.(\d+)\.)?(.+?)(\.weight|\.bias)?", name, re.S
    ).groups()
    if layer is not None and about.read is read_transformers and module.startswith("mixer."):
        mixer = config.layers()[int(layer)][0]
        module = mixer + module.removeprefix("mixer")
    place = "" if layer is None else f"{about.blocks}.{layer}."
    has_it = kind != ".bias" or re.fullmatch(about.biases, module)
    if has_it and is_shared:
        return name
    for pattern, replacement in about.names.items():
        if has_it and re.fullmatch(pattern, module):
            return place + re.sub(pattern, replacement, module) + (kind or "")
    raise UserError(f"{family} has no place for {show(name)}")


def shared_rows(
    config: GPTConfig, family: str, mixer: str, gate: Any
) -> Iterator[tuple[dict, dict, dict]]:
    """The weights of a layer whose rows are shared out otherwise there: ({name of theirs: (groups,
    blocks)}, {name of ours: blocks}, {block: its rows}), in the order of ours. Blocks are letters.
    A tensor has the rows of each of its blocks in group 0, then those in group 1 ... The model need
    not have all of them.

    Softmax: q_proj may have the rows of the gate (g). Gated DeltaNet: ours has q, k, v, beta and dt
    in in_proj, and its gate z apart; Mamba-2's has all but the gate.
    """
    is_of_fla, (Hk, H, Dk, Dv) = FAMILIES[family].read is read_fla, config.delta_sizes
    sizes = {"q": Hk * Dk, "k": Hk * Dk, "v": H * Dv, "z": H * Dv, "b": H, "a": H}
    if family == "phi3":
        sizes = dict.fromkeys("gu", config.mlp_width)
        yield {"mlp.gate_up_proj": (1, "gu")}, {"mlp.glu": "g", "mlp.up": "u"}, sizes
    elif mixer == "mamba2":
        H = config.expand * config.n_head
        sizes = {
            "z": H * config.head_dim,
            "x": H * config.head_dim + 2 * config.n_groups * config.state_size + H,
        }
        yield (
            {"mixer.in_proj": (1, "zx")},
            {"mixer.in_proj": "x", "mixer.gates.native.proj": "z"},
            sizes,
        )
    elif mixer == "softmax" and family not in ("gpt2", "nanogpt"):
        H, Hk, D = config.n_head, config.n_kv_head or config.n_head, config.head_dim
        granularity, place = (
            gate.positions.get("readout", "none"),
            "attn" if is_of_fla else "self_attn",
        )
        sizes = {
            "q": H * D,
            "k": Hk * D,
            "v": Hk * D,
            "g": H if granularity == "headwise" else H * D,
        }
        in_q_proj = (1, "q") if granularity == "none" else (H if family in GATED else Hk, "qg")
        theirs = {
            f"{place}.q_proj": in_q_proj,
            f"{place}.k_proj": (1, "k"),
            f"{place}.v_proj": (1, "v"),
        }
        with_gate = {} if granularity == "none" else {"mixer.gates.readout.proj": "g"}
        yield theirs, {"mixer.qkv": "qkv"} | with_gate, sizes
    elif is_of_fla:
        in_proj = "qkvba" if mixer == "gated_deltanet" else "qkvb"
        for ours, theirs, blocks in (
            ("qkv", "proj", "qkv"),
            ("in_proj", "proj", in_proj),
            ("conv", "conv1d", "qkv"),
        ):
            yield (
                {f"attn.{block}_{theirs}": (1, block) for block in blocks},
                {f"mixer.{ours}": blocks},
                sizes,
            )
    elif mixer == "gated_deltanet":
        layout = (
            {"qkvz": Hk, "ba": Hk} if family == "qwen3_next" else {"qkv": 1, "b": 1, "a": 1, "z": 1}
        )
        theirs = {
            f"linear_attn.in_proj_{blocks}": (groups, blocks) for blocks, groups in layout.items()
        }
        yield theirs, {"mixer.in_proj": "qkvba", "mixer.gates.native.proj": "z"}, sizes


def translation(name: str, family: str, block_size: int) -> tuple[Callable, Callable]:
    """(theirs to ours, ours to theirs) of a tensor of ours."""
    if name == "wpe.weight":  # as many positions as are kept
        return lambda w: w[:block_size], lambda w: w
    if family == "gpt2" and name.startswith("blocks"):
        # linear layers are (inputs, outputs) there; vectors stay as they are
        return torch.t, torch.t
    if name.endswith("mixer.conv.weight"):  # (channels, 1, width), ours (width, channels)
        return lambda w: w.squeeze(1).T, lambda w: w.T[:, None]
    # in bfloat16 the sum would lose digits
    if family in GATED and "norm" in name and "mixer.norm" not in name:
        return lambda w: at_least_float32(w) + 1, lambda w: at_least_float32(w) - 1
    return lambda w: w, lambda w: w
