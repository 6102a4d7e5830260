"""Where a run starts: from scratch, from the weights of another run, or where it was stopped.

config, resumed, source, notes = where_to_start(config)         # before any work
check_data(resumed, source, dataset, config)
model, new, notes = make_model(config, resumed, source)
scale_new(optimizers, new, config.new_lr_scale)

A run that goes on has the keys of its checkpoint, but for those that a config file or the command line gives. A run
that starts from the weights of another has that one's keys of the model, with the same exception.
"""

import configurator
from configurator import UserError

import dataclasses
import math
import os
from pathlib import Path

import torch

from data.shards import Dataset
from gate import ADDITIVE_ACTIVATIONS
from model import GPT, GPTConfig
from runs import checkpoint as checkpoints
from runs.hardware import number_in_environment
from runs.outdir import code_sha256, run_id
from runs.parallel import part_of

# what a checkpoint must hold for --init_from=resume
STATE = ("optimizer", "scaler", "iter_num", "best_val_loss", "rng", "data", "config", "dtype")
OF_THIS_START = ("out_dir", "init_from", "overwrite")  # keys that never come from a checkpoint
NO_WEIGHTS = ("scratch", "resume", "auto")  # values of init_from that name no checkpoint to start from
DERIVED = (("dtype", "auto"), ("vocab_size", None))  # keys that stand for what the run has found
# what torchrun --max-restarts and a job of SLURM that was queued again count their starts in
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def where_to_start(config) -> tuple:
    """(config, the checkpoint to resume or None, the one that gives the weights or None, lines to print)."""
    file = Path(config.out_dir) / "ckpt.pt"
    goes_on = file.is_file() and (config.init_from == "auto" or is_restart(config, file))
    if config.init_from != "resume" and not goes_on:
        return (config, None, None, []) if config.init_from in NO_WEIGHTS else start_from_weights(config)
    resumed = checkpoints.load(file)
    if lacks := [name for name in STATE if name not in resumed]:
        raise UserError(f"{file}: has no {lacks[0]}, to resume; --init_from={file} starts a new run from its weights")
    if run_id(file.parent) not in (None, resumed.get("run_id")):
        raise UserError(f"{file}: not of the run that {file.with_name('config.json')} describes; put its own one back")
    asked = {name: getattr(config, name) for name in getattr(config, "given", ())}
    kept = {name: value for name, value in resumed["model_args"].items() if name != "kernels"}  # the machine's
    of_model = dataclasses.asdict(configurator.build(GPTConfig, kept, source=str(file)))
    del of_model["kernels"]
    # a run's evaluations are compared with each other; older versions read the whole split
    of_run = of_model | {"eval_tokens": resumed["config"].get("eval_tokens")}
    for name, value in (of_run | {"dtype": resumed["dtype"]}).items():
        if name in asked and asked[name] != value and (name, asked[name]) not in DERIVED:
            raise UserError(
                f"{name}={asked[name]}: {file} has {value}, which a resumed run keeps; for a new run name another "
                "--out_dir"
            )
    known = {field.name for field in dataclasses.fields(config)} - {*OF_THIS_START, "kernels"}
    before = {name: value for name, value in resumed["config"].items() if name in known}  # older versions had fewer
    asked |= {name: getattr(config, name) for name in OF_THIS_START}
    config = configurator.build(type(config), before | asked | of_run, source=str(file))
    config.given = frozenset(asked)
    if resumed["iter_num"] > config.max_iters:
        raise UserError(f"max_iters={config.max_iters}: {file} is at step {resumed['iter_num']} already")
    notes = [f"resuming {config.out_dir} at step {resumed['iter_num']}", *what_changed(resumed.get("code_files"))]
    notes += [
        f"  {name}: {getattr(config, name)}, where the checkpoint has {before[name]}"
        for name in before
        if name in asked and name != "dtype" and getattr(config, name) != before[name]
    ]
    return config, resumed, None, notes


def start_from_weights(config) -> tuple:
    """What where_to_start returns for a run that starts from another's weights, with its keys of the model."""
    loaded, source, given = checkpoints.load(config.init_from), config.init_from, getattr(config, "given", frozenset())
    if os.path.realpath(checkpoints.file_of(source).parent) == os.path.realpath(config.out_dir):
        raise UserError(
            f"init_from={source}: lies in out_dir, where a new run replaces it; name another out_dir, or go on with "
            "--init_from=resume"
        )
    asked = {name: getattr(config, name) for name in given}
    if config.gate != "none":  # the default, so that it was asked for: attention=gated sets it, too
        asked["gate"] = config.gate
    kept = {name: value for name, value in loaded["model_args"].items() if name != "kernels"}  # the machine's
    of_model = dataclasses.asdict(configurator.build(GPTConfig, kept, source=source))
    del of_model["kernels"]
    config = configurator.build(type(config), dataclasses.asdict(config) | of_model | asked, source=source)
    config.given = given
    if config.rope_scaling == "yarn":  # whatever the block_size from here on
        config.rope_length = config.rope_length or of_model["block_size"]
    check_kept_gates(config, of_model)
    notes = [
        f"{name}: {getattr(config, name)}, where {source} has {value}"
        for name, value in of_model.items()
        if name in asked and getattr(config, name) != value
    ]
    return config, None, loaded, notes


def check_kept_gates(config, before: dict) -> None:
    """UserError for a key that would change the gates of the checkpoint. before: its keys."""
    has_gates = any(gate.positions for _, gate in configurator.build(GPTConfig, before).layers())
    if has_gates and config.gate_activation != before["gate_activation"]:
        raise UserError(
            f"gate_activation={config.gate_activation!r}: would change the gates that {config.init_from} has, too, "
            f"which are {before['gate_activation']!r}: all gates of a model share the key, but for native ones"
        )


def is_started_again() -> bool:
    """Whether torchrun or SLURM has started this command before."""
    return any(number_in_environment(name, 0) for name in RESTARTS)


def is_restart(config, file: Path) -> bool:
    """Whether torchrun or SLURM repeats the very command that wrote this ckpt.pt."""
    if not is_started_again():
        return False
    if config.init_from not in NO_WEIGHTS:
        config = start_from_weights(config)[0]  # the run saved the keys that it took from there, too
    before = checkpoints.load(file).get("config", {})
    return before | {"vocab_size": None} == dataclasses.asdict(config) | {"vocab_size": None}


def check_data(resumed: dict | None, source: dict | None, dataset: Dataset, config) -> None:
    """Raises UserError where a run would go on with data other than its own, or start with ids of other meaning."""
    if source is not None:
        checkpoints.check_vocabulary(math.inf, source, dataset)
    if resumed is not None and resumed["data"].get("sha256") != dataset.sha256:
        file = Path(config.out_dir) / "ckpt.pt"
        raise UserError(f"{config.dataset}: not the data that {file} was trained on, or an older version wrote it")


def what_changed(before: dict | None) -> list[str]:
    """Lines to print where the code that made a checkpoint, {file: SHA-256}, is not today's."""
    if not isinstance(before, dict):
        return ["  the checkpoint does not say which code made it: its results may be those of other code"]
    changed = [name for name, sha256 in code_sha256()[1].items() if before.get(name) != sha256]
    return [f"  the code has changed since this checkpoint: {', '.join(changed)}"] * bool(changed)


ADAMW_STATE = {"exp_avg", "exp_avg_sq", "step"}


def optimizer_state(optimizers: list[torch.optim.Optimizer]) -> dict:
    """The state_dict of one optimizer, or those of several as one: groups in a row, parameters numbered through."""
    groups, state, first = [], {}, 0
    for optimizer in optimizers:
        own = optimizer.state_dict()
        groups += [group | {"params": [first + i for i in group["params"]]} for group in own["param_groups"]]
        state |= {first + i: parts for i, parts in own["state"].items()}
        first += sum(len(group["params"]) for group in own["param_groups"])
    return {"state": state, "param_groups": groups}


def load_optimizers(optimizers: list[torch.optim.Optimizer], saved: dict, model: GPT) -> None:
    """Puts a saved optimizer_state into the optimizers: each moment to the parameter of its name.

    What an older version saved has no names, and must have the order of today's. ValueError for what cannot be of this
    model: AdamW's fused kernel would write past the end of a tensor of another shape.
    """
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    names = [name for optimizer in optimizers for group in optimizer.param_groups for name in group["param_names"]]
    saved_names = [name for group in saved["param_groups"] for name in group.get("param_names", ())] or names
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if sorted(saved_names) != sorted(names) or len(numbers) != len(names):
        raise ValueError(f"its optimizer has {len(numbers)} parameters of other names than the model's {len(names)}")
    state_of = {name: saved["state"].get(number) for name, number in zip(saved_names, numbers, strict=True)}
    for name, state in state_of.items():
        for part, tensor in (state or {}).items():
            if wrong := checkpoints.wrong_tensor(tensor):
                raise ValueError(f"its optimizer's {part} of {name} {wrong}")
            shape = () if part == "step" else shapes[name]
            if tuple(tensor.shape) != shape:
                raise ValueError(f"its optimizer's {part} of {name} is {tuple(tensor.shape)}, not {shape}")
    for optimizer in optimizers:
        own = [name for group in optimizer.param_groups for name in group["param_names"]]
        state = {i: state_of[name] for i, name in enumerate(own) if state_of[name]}
        if isinstance(optimizer, torch.optim.AdamW) and any(set(parts) != ADAMW_STATE for parts in state.values()):
            raise ValueError("its optimizer's state is not AdamW's")
        for i, parts in state.items():
            whole = {part: tensor for part, tensor in parts.items() if part != "step"}
            state[i] = parts | {part: part_of(parameters[own[i]], tensor) for part, tensor in whole.items()}
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def make_model(config, resumed: dict | None, source: dict | None) -> tuple[GPT, list[str], list[str]]:
    """(the model a run starts from, its parameters that the weights it started from lack, lines to print)"""
    model_args = {f.name: getattr(config, f.name) for f in dataclasses.fields(GPTConfig)}
    torch.manual_seed(config.seed)
    model_config = configurator.build(GPTConfig, model_args)
    if resumed is not None:
        model = checkpoints.build_model(model_config, resumed["model"], Path(config.out_dir) / "ckpt.pt")
        return model, resumed.get("new", []), []  # an older version has no "new"
    model = GPT(model_config)
    if source is None:
        return model, [], []
    own, weights = model.state_dict(), source["model"]
    fitting = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    if not fitting:
        raise UserError(f"init_from={config.init_from!r}: none of its weights fit this model")
    check_new_gates(model, fitting, weights, config.init_from)
    model.load_state_dict(own | fitting)
    fresh, unused = [n for n in own if n not in fitting], [n for n in weights if n not in fitting]
    notes = [f"starting from {config.init_from}: {len(fitting)} of {len(own)} tensors taken"]
    notes += (
        [f"  initialised anew, because they are missing there or have another shape: {', '.join(fresh)}"]
        if fresh
        else []
    )
    notes += [f"  left out: {', '.join(unused)}"] if unused else []
    return model, fresh, notes


@torch.no_grad()
def check_new_gates(model: GPT, fitting: dict, weights: dict, path: str) -> None:
    """UserError for a gate that is new in a trained mixer and does not start as the identity, or takes another's
    place."""
    own = set(model.state_dict())
    for i, block in enumerate(model.blocks):
        mixer = f"blocks.{i}.mixer."
        if not any(name.startswith(mixer) for name in fitting):
            continue  # the whole mixer is new
        had, kept = (
            {name.removeprefix(f"{mixer}gates.").split(".")[0] for name in names if name.startswith(f"{mixer}gates.")}
            for names in (weights, fitting)
        )
        new = {position: gate for position, gate in block.mixer.gates.items() if position not in kept}
        for position in kept:
            start = f"{mixer}gates.{position}."
            changed = {name for name in own ^ set(weights) if name.startswith(start)}
            if changed:
                bias = f"gate_bias={model.config.gate_bias}"
                has = "has none" if changed <= own else "has one"
                raise UserError(f"{bias}: would change the trained gate of layer {i} of {path}, which {has}")
        if new and had - kept:
            raise UserError(
                f"gate={model.config.gate!r}: layer {i} of {path} has a trained gate ({', '.join(sorted(had - kept))}) "
                "that would be lost to a new one; keep it in gate, joined by + with another position's, or add none"
            )
        for position, gate in new.items():
            value = gate.value(gate.logits(torch.ones(1, 1, model.config.n_embd)))
            start = 0.0 if gate.activation in ADDITIVE_ACTIVATIONS else 1.0
            if (value != start).any():
                what = "the native gate" if position == "native" else f"gate_activation={gate.activation!r}"
                raise UserError(
                    f"{what}: a new gate would start at {float(value.flatten()[0]):.3g}, not {start:g}, and change "
                    f"what {path} computes; --gate=elementwise --gate_activation=sigmoid2 starts at the same function"
                )


def scale_new(optimizers: list[torch.optim.Optimizer], new: list[str], scale: float) -> None:
    """Gives the parameters of these names groups of their own, in which lr_scale is `scale` times what it was."""
    names = set(new) if scale != 1 else set()
    for optimizer in optimizers:
        for group in list(optimizer.param_groups):
            parts = list(zip(group["param_names"], group["params"], strict=True))
            fresh = [part for part in parts if part[0] in names]
            if not fresh:
                continue
            kept = [part for part in parts if part[0] not in names]
            group["param_names"], group["params"] = [name for name, _ in kept], [p for _, p in kept]
            own = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            optimizer.add_param_group(own | {"params": fresh, "lr_scale": scale * group["lr_scale"]})
