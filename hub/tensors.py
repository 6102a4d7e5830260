"""The tensors of a family and ours: their names, which rows each of them has, and what its numbers
mean."""

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch

from configurator import UserError, show
from hub.families import FAMILIES, GATED, NAMES, kind_of, read_fla
from model import GPTConfig
from ops.fast import at_least_float32


class Part(NamedTuple):
    """Tensors of theirs and of ours that have the same blocks of rows, each a letter, in another
    order. A tensor has the rows of each of its blocks in group 0, then those in group 1 ..."""

    theirs: dict[str, tuple[int, str]]  # {name: (groups, blocks)}
    ours: dict[str, str]  # {name: blocks}
    sizes: dict[str, int]  # rows of each block

    def to_ours(self, tensors: dict, family: str, block_size: int) -> dict[str, torch.Tensor]:
        rows = {}
        for name, (groups, blocks) in self.theirs.items():
            rows |= split(tensors[name], groups, blocks, self.sizes)
        made = {}
        for name, blocks in self.ours.items():
            translate, _ = translation(name, family, block_size)
            made[name] = translate(join(rows, 1, blocks))
        return made

    def to_theirs(self, weights: dict, family: str, block_size: int) -> dict[str, torch.Tensor]:
        rows = {}
        for name, blocks in self.ours.items():
            _, translate = translation(name, family, block_size)
            rows |= split(translate(weights[name]), 1, blocks, self.sizes)
        return {name: join(rows, *place) for name, place in self.theirs.items()}


def split(tensor: torch.Tensor, groups: int, blocks: str, sizes: dict) -> dict[str, torch.Tensor]:
    """{block: its rows} of a tensor."""
    if len(blocks) == 1:
        return {blocks: tensor}
    rows = [sizes[block] // groups for block in blocks]
    parts = tensor.unflatten(0, (groups, -1)).split(rows, dim=1)
    return {block: part.flatten(0, 1) for block, part in zip(blocks, parts, strict=True)}


def join(rows: dict[str, torch.Tensor], groups: int, blocks: str) -> torch.Tensor:
    """The tensor of these blocks."""
    if len(blocks) == 1:
        return rows[blocks]
    parts = [rows[block].unflatten(0, (groups, -1)) for block in blocks]
    return torch.cat(parts, dim=1).flatten(0, 1)


def parts_of(config: GPTConfig, family: str, names: Collection[str]) -> Iterator[Part]:
    """Yields every Part of the model, each tensor in one of them. names: those of our tensors.
    Raises UserError for one that the family does not have."""
    there = FAMILIES[family].blocks
    shared = set()
    for i, (mixer, gate) in enumerate(config.layers()):
        for theirs, ours, sizes in shared_rows(config, family, mixer, gate):
            for kind in ("weight", "bias"):
                part = Part(
                    {f"{there}.{i}.{module}.{kind}": place for module, place in theirs.items()},
                    {f"blocks.{i}.{module}.{kind}": blocks for module, blocks in ours.items()},
                    sizes,
                )
                if part.ours.keys() <= set(names):
                    shared |= part.ours.keys()
                    yield part
    for name in names:
        if name not in shared:
            yield Part({their_name(name, config, family): (1, "x")}, {name: "x"}, {})


def their_name(name: str, config: GPTConfig, family: str) -> str:
    """What a tensor of ours is called there. Raises UserError for one that the family does not
    have."""
    about = FAMILIES[family]
    layer, module, kind = re.fullmatch(
        r"(?:blocks\.(\d+)\.)?(.+?)(\.weight|\.bias)?", name, re.S
    ).groups()
    place = ""
    if layer is not None:
        place = f"{about.blocks}.{layer}."
        if about.names is NAMES and module.startswith("mixer."):
            mixer, _ = config.layers()[int(layer)]
            module = kind_of(mixer) + module.removeprefix("mixer")
    if module not in about.names:
        raise UserError(f"{family} has no place for {show(name)}")
    return place + about.names[module] + (kind or "")


def shared_rows(
    config: GPTConfig, family: str, mixer: str, gate: Any
) -> Iterator[tuple[dict, dict, dict]]:
    """The modules of a layer whose rows are shared out otherwise there: ({name of theirs: (groups,
    blocks)}, {name of ours: blocks}, {block: its rows}). The model need not have all of them.

    Softmax: q_proj may have the rows of the gate (g). Gated DeltaNet: ours has q, k, v, beta and dt
    in in_proj, and its gate z apart; Mamba-2's has all but the gate.
    """
    is_of_fla = FAMILIES[family].read is read_fla
    Hk, H, Dk, Dv = config.head_sizes
    sizes = {"q": Hk * Dk, "k": Hk * Dk, "v": H * Dv, "z": H * Dv, "b": H, "a": H}
    if mixer == "mamba2":
        H, D, N = config.expand * config.n_head, config.head_dim, config.state_size
        ours = {"mixer.in_proj": "x", "mixer.gates.native.proj": "z"}
        yield {"mixer.in_proj": (1, "zx")}, ours, {"z": H * D, "x": H * D + 2 * N + H}
    elif kind_of(mixer) == "softmax" and family not in ("gpt2", "nanogpt"):
        H, Hk, D = config.n_head, config.n_kv_head or config.n_head, config.head_dim
        granularity = gate.positions.get("readout")
        sizes = {"q": H * D, "k": Hk * D, "v": Hk * D, "g": H * D}
        ours = {"mixer.qkv": "qkv"}
        in_q_proj = (1, "q")
        if granularity:
            ours["mixer.gates.readout.proj"] = "g"
            in_q_proj = (H if family in GATED else Hk, "qg")
        if granularity == "headwise":
            sizes["g"] = H
        place = "attn" if is_of_fla else "self_attn"
        theirs = {"q_proj": in_q_proj, "k_proj": (1, "k"), "v_proj": (1, "v")}
        yield {f"{place}.{name}": rows for name, rows in theirs.items()}, ours, sizes
    elif is_of_fla:
        in_proj = "qkvba" if mixer == "gated_deltanet" else "qkvb"
        for ours, theirs, blocks in (
            ("qkv", "proj", "qkv"),
            ("in_proj", "proj", in_proj),
            ("conv", "conv1d", "qkv"),
        ):
            there = {f"attn.{block}_{theirs}": (1, block) for block in blocks}
            yield there, {f"mixer.{ours}": blocks}, sizes
    elif mixer == "gated_deltanet":
        layout = {"qkv": 1, "b": 1, "a": 1, "z": 1}
        if family == "qwen3_next":
            layout = {"qkvz": Hk, "ba": Hk}
        there = {f"linear_attn.in_proj_{name}": (n, name) for name, n in layout.items()}
        yield there, {"mixer.in_proj": "qkvba", "mixer.gates.native.proj": "z"}, sizes


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
