"""The tensors of a family and ours: their names, whose rows are whose, and what the numbers mean."""

from collections.abc import Iterator
from typing import Any

import torch

from hub.families import FAMILIES, GATED, NAMES_OF_GPT2, read_fla
from model import GPT, GPTConfig, Softmax
from ops.fast import at_least_float32


def parts_of(model: GPT, family: str) -> Iterator[tuple[dict[str, int], list[str]]]:
    """Yields ({name of theirs: its rows}, [names of ours]): tensors that hold the same rows, one
    after another. Each tensor of ours is in one part. One alone has 0 for its rows, which are not
    known yet."""
    names = list(model.state_dict())
    for i, block in enumerate(model.blocks):
        for theirs, ours in stacked(block.mixer, family):
            for kind in ("weight", "bias"):
                here = [f"blocks.{i}.mixer.{module}.{kind}" for module in ours]
                if set(here) <= set(names):
                    names = [name for name in names if name not in here]
                    place = f"{FAMILIES[family].blocks}.{i}"
                    yield {f"{place}.{module}.{kind}": n for module, n in theirs.items()}, here
    for name in names:
        yield {their_name(name, model, family): 0}, [name]


def stacked(mixer: Any, family: str) -> Iterator[tuple[dict[str, int], list[str]]]:
    """Yields parts_of a mixer by its modules; it need not have all of them. gate_proj is what
    take_gates_apart makes of q_proj."""
    if FAMILIES[family].names is NAMES_OF_GPT2:
        return
    gates = [f"gates.{name}.proj" for name in mixer.gates]  # one at most
    n_gate = sum(len(gate.proj.weight) for gate in mixer.gates.values())
    if isinstance(mixer, Softmax):
        rows = [*mixer.qkv.parts, n_gate] if gates else mixer.qkv.parts
        names = ("q_proj", "k_proj", "v_proj", "gate_proj")
        yield {f"self_attn.{x}": n for x, n in zip(names, rows, strict=False)}, ["qkv", *gates]
    elif family == "mamba2":
        yield {"mixer.in_proj": n_gate + sum(mixer.in_proj.parts)}, [*gates, "in_proj"]
    elif FAMILIES[family].read is read_fla:
        yield {f"attn.{x}_conv1d": n for x, n in zip("qkv", mixer.split, strict=True)}, ["conv"]
        linear = "qkv" if family == "gla" else "in_proj"
        rows = mixer.get_submodule(linear).parts
        yield {f"attn.{x}_proj": n for x, n in zip("qkvba", rows, strict=False)}, [linear]
    else:
        q, k, v, b, a = mixer.in_proj.parts
        rows = {"in_proj_qkv": q + k + v, "in_proj_b": b, "in_proj_a": a, "in_proj_z": n_gate}
        yield {f"linear_attn.{x}": n for x, n in rows.items()}, ["in_proj", *gates]


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


def has_one_less(name: str, family: str) -> bool:
    """Whether a tensor of ours, a norm, is 1 + weight there."""
    return family == GATED and "norm" in name and "mixer.norm" not in name


def to_ours(name: str, tensor: torch.Tensor, model: GPT, family: str) -> torch.Tensor:
    """Their tensor with the numbers of ours."""
    if name == "wpe.weight":  # as many positions as are kept
        return tensor[: model.config.block_size]
    if family == "gpt2" and name.startswith("blocks"):  # (inputs, outputs); or a vector
        return tensor.t()
    if name.endswith("mixer.conv.weight"):  # (channels, 1, width), ours (width, channels)
        return tensor.squeeze(1).T
    if has_one_less(name, family):  # in bfloat16 the sum would lose digits
        return at_least_float32(tensor) + 1
    return tensor


def to_theirs(name: str, tensor: torch.Tensor, family: str) -> torch.Tensor:
    """Our tensor with the numbers of theirs."""
    if name.endswith("mixer.conv.weight"):
        return tensor.T[:, None]
    if has_one_less(name, family):
        return at_least_float32(tensor) - 1
    return tensor


def take_gates_apart(tensors: dict, config: GPTConfig, family: str) -> None:
    """Leaves their q_proj the rows of queries, and adds those of gates as gate_proj. They stand in
    turn, for each head of a Qwen3.5, and for each key/value head in the models of Qiu et al."""
    groups = config.n_head if family == GATED else config.n_kv_head or config.n_head
    queries = config.n_head * config.head_dim // groups  # rows in a group
    for name in list(tensors):
        if name.endswith("self_attn.q_proj.weight"):
            rows = tensors[name].unflatten(0, (groups, -1))
            tensors[name] = rows[:, :queries].flatten(0, 1)
            tensors[name.replace("q_proj", "gate_proj")] = rows[:, queries:].flatten(0, 1)


def put_gates_between(tensors: dict, config: GPTConfig) -> None:
    """The reverse, for a Qwen3.5, which has as many rows of gates as of queries."""
    for name in list(tensors):
        if name.endswith("self_attn.gate_proj.weight"):
            query = name.replace("gate_proj", "q_proj")
            rows = torch.stack([tensors[query], tensors.pop(name)])  # (2, H D, C)
            heads = rows.unflatten(1, (config.n_head, -1)).movedim(0, 1)  # (H, 2, D, C)
            tensors[query] = heads.flatten(0, 2)
