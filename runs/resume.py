"""Where a run starts: from scratch, from the weights of another run, or where it was stopped.

A run that goes on has the keys of its checkpoint, but for those that a config file or the command
line gives. A run that starts from the weights of another has that one's keys of the model, with the
same exception.
"""

import dataclasses
import math
import os
from pathlib import Path

import torch

import configurator
from configurator import UserError, show
from gate import Gate
from keys import WITH_ROPE_LENGTH, TrainConfig, without_alias
from model import GPT, GPTConfig
from runs import checkpoint as checkpoints
from runs import files
from runs.checkpoint import TEXT
from runs.hardware import DTYPES
from runs.outdir import code_sha256
from runs.parallel import load_moments, named_parameters
from runs.rules import Rule, wrong_field

# what a checkpoint must hold for --init_from=resume; rules.wrong_field says how the tables are read
SECONDS = (float, 0, 1e12)
STATE = {
    "optimizer": {"state": {str: (dict, 0, 99)}},  # load_optimizers looks at the tensors
    "scaler": (dict, 0, 99), "iter_num": (int, 0, 1 << 60), "seconds": SECONDS, "eval_seconds": SECONDS,
    "best_val_loss": (float, 0, math.inf), "rng": object, "run_id": (str, 32, 32), "data": {"sha256": TEXT},
    "config": {str: object}, "dtype": set(DTYPES), "new": [TEXT, 0, 1 << 20], "code_files": {str: TEXT},
}  # fmt: skip
FINITE_LOSS = (float, 0, 1e30)  # of the best one, once there was an evaluation
SCALER = {  # of float16; in another dtype it is off, and has no state
    "scale": Rule(float, above=0, at_most=1e38), "growth_factor": (float, 1, 1e9), "backoff_factor": (float, 1e-9, 1),
    "growth_interval": (int, 1, 1 << 60), "_growth_tracker": (int, 0, 1 << 60),
}  # fmt: skip
OF_THIS_START = ("out_dir", "init_from", "overwrite")  # keys that never come from a checkpoint
OF_SCHEDULE = ("schedule", "decay_iters", "lr_decay_iters", "min_lr")
MOMENTS = {"AdamW": {"exp_avg", "exp_avg_sq", "step"}, "Muon": {"momentum_buffer"}}
# AdamW takes the root of the one, and divides by what the other gives
NEVER_NEGATIVE = ("exp_avg_sq", "step")
# seconds that init_from=auto waits for the lock: a file server may not know yet that a machine is
# gone (NFS 4: 90)
LOCK_WAIT = 120.0
# keys that stand for what the run has derived
DERIVED = (("dtype", "auto"), ("vocab_size", None), ("head_dim", None))


def where_to_start(given: dict) -> tuple:
    """(config, the checkpoint to resume or None, the one that gives the weights or None, lines to
    print), where the keys of config files and of the command line are `given`."""
    given = without_alias(given)
    init_from = given.get("init_from", TrainConfig.init_from)
    file = Path(given.get("out_dir", TrainConfig.out_dir)) / "ckpt.pt"
    if init_from == "auto" and os.path.isfile(file.with_name("lock")):
        try:
            files.lock(file.parent).close()  # the job before this one may still be writing it
        except files.InUse as error:
            print(f"waiting up to {LOCK_WAIT:g} s for the lock: {error}", flush=True)
            files.lock(file.parent, LOCK_WAIT).close()
    if init_from == "resume" or os.path.isfile(file) and init_from == "auto":
        config, *rest = go_on(given, file)
    elif init_from not in ("scratch", "auto"):
        config, *rest = start_from_weights(given, init_from)
    else:
        config, *rest = configurator.build(TrainConfig, given), None, None, []
        if config.keep_moments:
            raise UserError(
                f"keep_moments=True: init_from={init_from!r} has none; name a run's ckpt.pt there"
            )
    config.user_keys = frozenset(given)
    return config, *rest


def go_on(given: dict, file: Path) -> tuple:
    """What where_to_start returns for a run that goes on from this ckpt.pt."""
    written = file.stat().st_mtime_ns if os.path.isfile(file) else None
    resumed, about = (
        checkpoints.load(file, mapped=True) | {"written": written},
        file.with_name("config.json"),
    )
    if missing := [name for name in STATE if name not in resumed]:
        raise UserError(
            f"{file}: has no {missing[0]}, to resume; --init_from={file} starts a new run from its weights"
        )
    if wrong := wrong_state(resumed):
        raise UserError(f"{file}: no run can go on from it ({wrong})")
    if os.path.isfile(about) and resumed["run_id"] not in about.read_text(
        encoding="utf-8", errors="replace"
    ):
        raise UserError(f"{file}: not of the run that {about} describes; put its own one back")
    before = dataclasses.asdict(
        configurator.build(TrainConfig, resumed["config"], source=str(file))
    )
    before = {
        name: value for name, value in before.items() if name not in (*OF_THIS_START, "kernels")
    }
    of_model = model_keys(resumed, file)
    # a run's evaluations are compared with each other: they read the same sample in the same way
    names = ("eval_tokens", "mask_documents", "optimizer", "gate_optimizer")
    kept = {name: before[name] for name in names} | {"dtype": resumed["dtype"]}
    for name, had in (of_model | kept).items():
        if (asked := given.get(name, had)) != had and (name, asked) not in DERIVED:
            raise UserError(
                f"{name}={asked}: {file} has {had}, which a resumed run keeps; leave it out, or its config"
            )
    # another schedule replaces all that the checkpoint says of its own
    is_other = (
        given.get("schedule", before["schedule"]) != before["schedule"]
        or given.get("decay_lr") is False
    )
    new = dict.fromkeys(OF_SCHEDULE) | {"decay_lr": True} if is_other else {}
    values = before | new | given | of_model | {"dtype": resumed["dtype"]}
    config = configurator.build(TrainConfig, values, source=str(file))
    had, asked = rows_of_step(before), rows_of_step(dataclasses.asdict(config))
    if asked != had:
        raise UserError(
            f"batch_size={config.batch_size}, gradient_accumulation_steps={config.gradient_accumulation_steps}: {file} "
            f"has {had} rows a step, which a resumed run keeps, and not {asked}: its place in the data is the step "
            f"times the rows; --init_from={file} --keep_moments=true goes on with other rows as a new run"
        )
    if resumed["iter_num"] > config.max_iters:
        raise UserError(
            f"max_iters={config.max_iters}: {file} is at step {resumed['iter_num']} already"
        )
    for name in ("dtype", "keep_moments", *["new_lr_scale"] * (not resumed["new"])):
        del before[name]  # what was derived of auto, and what does nothing here
    notes = [f"resuming {config.out_dir} at step {resumed['iter_num']}"]
    then, now = resumed["code_files"], code_sha256()[1]
    if changed := sorted(name for name in then | now if then.get(name) != now.get(name)):
        notes.append(f"the code has changed since this checkpoint: {', '.join(changed)}")
    return config, resumed, None, notes + differences(config, given, before, "the checkpoint")


def wrong_state(resumed: dict) -> str | None:
    """Says in words what is wrong with a field that a run goes on from, or returns None."""
    if wrong := wrong_field(resumed, STATE):
        return wrong
    # the first evaluation is at step 0, unless a signal comes before it
    is_evaluated = resumed["iter_num"] > 0
    scaler = SCALER if resumed["dtype"] == "float16" else (dict, 0, 0)
    return wrong_field(
        resumed, {"scaler": scaler} | ({"best_val_loss": FINITE_LOSS} if is_evaluated else {})
    )


def rows_of_step(keys: dict) -> int:
    """How many examples a step reads, whatever the number of processes."""
    return keys["batch_size"] * keys["gradient_accumulation_steps"]


def start_from_weights(given: dict, path: str) -> tuple:
    """What where_to_start returns for a run that starts from another's weights, with its keys of
    the model."""
    source = checkpoints.load(path, mapped=True)
    of_model = model_keys(source, path)
    config = configurator.build(TrainConfig, of_model | given, source=path)
    if files.find_checkpoint(path).resolve().parent == Path(config.out_dir).resolve():
        raise UserError(
            f"init_from={path}: lies in out_dir, where a new run replaces it; give another out_dir"
        )
    if config.rope_scaling in WITH_ROPE_LENGTH:  # whatever the block_size from here on
        config.rope_length = config.rope_length or of_model["block_size"]
    has_gates = any(gate.positions for _, gate in configurator.build(GPTConfig, of_model).layers())
    if has_gates and config.gate_activation != of_model["gate_activation"]:
        had = of_model["gate_activation"]
        raise UserError(
            f"gate_activation={config.gate_activation!r}: would change the gates that {path} has: {had!r}"
        )
    notes = differences(config, given, of_model, path)
    if config.keep_moments:
        needed = ("optimizer", "config", "iter_num")
        if missing := [name for name in needed if name not in source]:
            raise UserError(
                f"keep_moments=True: {path} has no {missing[0]}; a run's ckpt.pt or best.pt has it"
            )
        if wrong := wrong_field(source, {name: STATE[name] for name in needed}):
            raise UserError(f"keep_moments=True: {path}: {wrong}")
        had = configurator.build(TrainConfig, source["config"], source=path).optimizer
        if had != config.optimizer:
            raise UserError(
                f"keep_moments=True: {path} has the moments of {had}, not of optimizer={config.optimizer}"
            )
        notes.append(
            f"with the moments that the optimizer of {path} had at step {source['iter_num']}"
        )
    return config, None, source, notes


def differences(config, given: dict, before: dict, where: str) -> list[str]:
    """Lines about the keys that were given and differ from what a checkpoint has."""
    keys = [name for name in before if name in given and getattr(config, name) != before[name]]
    return [f"{name}: {getattr(config, name)}, where {where} has {before[name]}" for name in keys]


def model_keys(checkpoint: dict, path: Path | str) -> dict:
    """{key of the model: value} of a checkpoint, but for kernels, which this machine may lack."""
    saved = checkpoint["model_args"] | {"kernels": GPTConfig.kernels}
    keys = dataclasses.asdict(configurator.build(GPTConfig, saved, source=str(path)))
    return {name: value for name, value in keys.items() if name != "kernels"}


def check_moments(optimizers: list[torch.optim.Optimizer], moments: dict) -> None:
    """Raises ValueError for moments {name: {"exp_avg": tensor ...}} that are not whole tensors of
    these optimizers: AdamW's fused kernel would write past the end of a smaller one."""
    names = set()
    for optimizer in optimizers:
        names |= {name for name, _ in named_parameters(optimizer)}
    if moments.keys() != names:
        raise ValueError(
            f"its optimizer has {len(moments)} parameters, of other names than the model's"
        )
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for name, parameter in named_parameters(optimizer):
            parts = moments[name]
            if parts and parts.keys() != MOMENTS.get(kind, parts.keys()):
                raise ValueError(f"its optimizer's state is not {kind}'s")
            for part, tensor in parts.items():
                if not isinstance(tensor, torch.Tensor):
                    raise ValueError(
                        f"its optimizer's {part} of {name} is {show(tensor)}, which is no tensor"
                    )
                # torch's NAdam has another
                is_number = part == "step" or kind not in MOMENTS and tensor.shape == ()
                shape = () if is_number else tuple(parameter.shape)
                if tuple(tensor.shape) != shape or checkpoints.wrong_tensor(tensor):
                    raise ValueError(
                        f"its optimizer's {part} of {name} is no finite tensor of shape {shape}"
                    )
                if part in NEVER_NEGATIVE and (tensor < 0).any():
                    raise ValueError(f"its optimizer's {part} of {name} is negative")


def restore(
    saved: dict,
    model: GPT,
    optimizers: list[torch.optim.Optimizer],
    file: Path | str,
    scaler=None,
) -> None:
    """Gives the parameters their moments and, where a run goes on, the scaler its scale and torch
    its random state. Raises UserError for wrong ones."""
    with files.one_line(f"{file}: no run can go on from it", Exception):
        check_moments(optimizers, saved["optimizer"]["state"])
        load_moments(model, optimizers, saved["optimizer"]["state"])
        if scaler is not None:
            scaler.load_state_dict(saved["scaler"])
            torch.set_rng_state(saved["rng"].cpu())


def scale_new(optimizers: list[torch.optim.Optimizer], new: list[str], scale: float) -> None:
    """Gives the parameters of these names groups of their own, in which lr_scale is `scale` times
    what it was."""
    for optimizer in optimizers:
        for group in list(optimizer.param_groups) if scale != 1 else ():
            pairs = list(zip(group["param_names"], group["params"], strict=True))
            if fresh := [pair for pair in pairs if pair[0] in new]:
                kept = [pair for pair in pairs if pair[0] not in new]
                group["param_names"], group["params"] = (
                    [name for name, _ in kept],
                    [p for _, p in kept],
                )
                optimizer.add_param_group(
                    group | {"params": fresh, "lr_scale": scale * group["lr_scale"]}
                )


@torch.no_grad()
def take_weights(
    model: GPT, weights: dict[str, torch.Tensor], path: str
) -> tuple[list[str], list[str]]:
    """Copies the weights of the same name and shape into the model. Returns (names that keep their
    start, lines to print). Raises UserError where none fits, or where a new gate would change what
    a trained mixer computes."""
    state = model.state_dict()
    fitting = {
        name: value
        for name, value in weights.items()
        if name in state and state[name].shape == value.shape
    }
    if not fitting:
        raise UserError(f"init_from={path!r}: none of its weights fit this model")
    for i, block in enumerate(model.blocks):
        mixer = f"blocks.{i}.mixer."
        if not any(name.startswith(mixer) for name in fitting):
            continue  # the whole mixer is new
        lost = [
            name for name in weights if name.startswith(f"{mixer}gates.") and name not in fitting
        ]
        for place, gate in block.named_modules():
            if not isinstance(gate, Gate):
                continue
            if all(f"blocks.{i}.{place}.{name}" in fitting for name in gate.state_dict()):
                continue
            if lost:
                raise UserError(
                    f"{path}: has a trained gate ({lost[0]}) that would be lost to a new one"
                )
            value = gate.value(gate.logits(torch.ones(1, 1, model.config.n_embd)))
            identity = 1.0 if gate.is_factor else 0.0
            if (value != identity).any():
                name, start = place.removeprefix("mixer.gates."), float(value.flatten()[0])
                raise UserError(
                    f"gate {name}: a new gate would start at {start:.3g}, not {identity:g}, "
                    f"and change what {path} computes; --gate_activation=sigmoid2 starts at the same function"
                )
    model.load_state_dict(state | fitting)
    new, unused = (
        [name for name in state if name not in fitting],
        [name for name in weights if name not in fitting],
    )
    notes = [f"starting from {path}: {len(fitting)} of {len(state)} tensors taken"]
    for names, what in (
        (new, "initialised anew, missing there or of another shape"),
        (unused, "left out"),
    ):
        notes += [f"  {what}: {', '.join(names)}"] if names else []
    return new, notes
