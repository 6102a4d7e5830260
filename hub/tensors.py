"""The tensors of a family and ours: their names, which rows each of them has, and what its numbers
mean."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from hub.families import FAMILIES, GATED, NAMES_OF_GPT2, read_fla
from model import GPT, Softmax
from ops.fast import at_least_float32


class Part(NamedTuple):
    """Tensors of theirs and of ours that have the same blocks of rows, each a letter, in another
    order. A tensor has the rows of each of its blocks in group 0, then those in group 1 ..."""

    theirs: dict[str, tuple[int, str]]  # {name: (groups, blocks)}
    ours: dict[str, str]  # {name: blocks}
    sizes: dict[str, int]  # rows of each block
    translation: tuple[Callable, Callable]  # of the numbers: theirs to ours, ours to theirs

    def to_ours(self, tensors: dict) -> dict[str, torch.Tensor]:
        rows = {}
        for name, (groups, blocks) in self.theirs.items():
            rows |= split(tensors[name], groups, blocks, self.sizes)
        translate = self.translation[0]
        return {name: translate(join(rows, 1, blocks)) for name, blocks in self.ours.items()}

    def to_theirs(self, weights: dict) -> dict[str, torch.Tensor]:
        rows = {}
        for name, blocks in self.ours.items():
            rows |= split(self.translation[1](weights[name]), 1, blocks, self.sizes)
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


def parts_of(model: GPT, family: str) -> Iterator[Part]:
    """Yields every Part of the model, each tensor in one of them."""
    names = list(model.state_dict())
    for i, block in enumerate(model.blocks):
        place = f"{FAMILIES[family].blocks}.{i}"
        for theirs, ours in shared_rows(block.mixer, family):
            for kind in ("weight", "bias"):
                there = {f"{place}.{module}.{kind}": rows for module, rows in theirs.items()}
                here = {f"blocks.{i}.mixer.{module}.{kind}": rows for module, rows in ours.items()}
                if here.keys() <= set(names):
                    names = [name for name in names if name not in here]
                    sizes = sizes_of(block.mixer, ours)
                    yield Part(there, here, sizes, translation(next(iter(here)), family, model))
    for name in names:
        there = {their_name(name, model, family): (1, "x")}
        yield Part(there, {name: "x"}, {}, translation(name, family, model))


def sizes_of(mixer: Any, ours: dict[str, str]) -> dict[str, int]:
    """{block: its rows} of the blocks of a mixer's modules."""
    sizes = {}
    for module, blocks in ours.items():
        if module == "conv":
            rows = mixer.split
        else:
            linear = mixer.get_submodule(module)
            rows = linear.parts if len(blocks) > 1 else [len(linear.weight)]
        sizes |= zip(blocks, rows, strict=True)
    return sizes


def their_name(name: str, model: GPT, family: str) -> str:
    """What a tensor of ours is called there: the first of the family's names that it begins with
    is replaced."""
    place = ""
    if name.startswith("blocks."):
        _, layer, name = name.split(".", 2)
        place = f"{FAMILIES[family].blocks}.{layer}."
        if isinstance(model.blocks[int(layer)].mixer, Softmax):
            name = name.replace("mixer.", "softmax.")
    for ours, theirs in FAMILIES[family].names.items():
        if name.startswith(ours):
            return place + theirs + name.removeprefix(ours)
    return place + name


def shared_rows(mixer: Any, family: str) -> Iterator[tuple[dict, dict]]:
    """The modules of a mixer whose rows are shared out otherwise there: ({name of theirs: (groups,
    blocks)}, {name of ours: blocks}). The mixer need not have all of them.

    Softmax: q_proj may have the rows of the gate (g). Gated DeltaNet: ours has q, k, v, beta and dt
    in in_proj, and its gate z apart; Mamba-2's has all but the gate.
    """
    about = FAMILIES[family]
    Hk = mixer.shapes["key"][0]
    if about.names is NAMES_OF_GPT2:
        return
    if isinstance(mixer, Softmax):
        place = "attn" if about.read is read_fla else "self_attn"
        theirs = {f"{place}.{block}_proj": (1, block) for block in "qkv"}
        ours = {"qkv": "qkv"}
        if mixer.gates:
            theirs[f"{place}.q_proj"] = (mixer.n_head if family in GATED else Hk, "qg")
            ours["gates.readout.proj"] = "g"
        yield theirs, ours
    elif about.read is read_fla:
        in_proj = "qkvba" if getattr(mixer, "decay", "") == "head" else "qkvb"
        for module, suffix, blocks in (
            ("qkv", "proj", "qkv"),
            ("in_proj", "proj", in_proj),
            ("conv", "conv1d", "qkv"),
        ):
            yield {f"attn.{block}_{suffix}": (1, block) for block in blocks}, {module: blocks}
    elif family == "mamba2":
        yield {"mixer.in_proj": (1, "zx")}, {"in_proj": "x", "gates.native.proj": "z"}
    else:
        layout = {"qkv": 1, "b": 1, "a": 1, "z": 1}
        if family == "qwen3_next":
            layout = {"qkvz": Hk, "ba": Hk}
        theirs = {f"linear_attn.in_proj_{blocks}": (n, blocks) for blocks, n in layout.items()}
        yield theirs, {"in_proj": "qkvba", "gates.native.proj": "z"}


def translation(name: str, family: str, model: GPT) -> tuple[Callable, Callable]:
    """(theirs to ours, ours to theirs) of a tensor of ours."""
    if name == "wpe.weight":  # as many positions as are kept
        return lambda w: w[: model.config.block_size], lambda w: w
    if family == "gpt2" and name.startswith("blocks"):
        # linear layers are (inputs, outputs) there; vectors stay as they are
        return torch.t, torch.t
    if name.endswith("mixer.conv.weight"):  # (channels, 1, width), ours (width, channels)
        return lambda w: w.squeeze(1).T, lambda w: w.T[:, None]
    # in bfloat16 the sum would lose digits
    if family in GATED and "norm" in name and "mixer.norm" not in name:
        return lambda w: at_least_float32(w) + 1, lambda w: at_least_float32(w) - 1
    return lambda w: w, lambda w: w
