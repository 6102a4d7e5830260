"""Where a run starts: from scratch, from the weights of another run, or where it was stopped.

A run that goes on has the keys of its checkpoint, but for those that a config file or the command
line gives. A run that starts from the weights of another has that one's keys of the model, with the
same exception.
"""

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

import torch

from base import configurator, files
from base.configurator import UserError
from base.tensors import wrong_tensor
from data.shards import Dataset, open_dataset
from gate import Gate
from keys import WITH_ROPE_LENGTH, TrainConfig, without_alias
from model import GPT, GPTConfig, check_documents
from runs import checkpoint as checkpoints
from runs.checkpoint import OF_A_RUN, check_same_meaning
from runs.hardware import Processes
from runs.muon import Muon
from runs.outdir import code_sha256
from runs.parallel import check_micro_steps, load_moments, named_parameters

# the fields of a checkpoint without which no run goes on from it
NEEDED = ("iter_num", "data", "dtype", *(name.rstrip("?") for name in OF_A_RUN))
# keys that never come from a checkpoint's config; dtype, since its field `dtype` has what auto became
OF_THIS_START = (
    "out_dir",
    "init_from",
    "overwrite",
    "dry_run",
    "kernels",
    "keep_moments",
    "dtype",
)
OF_SCHEDULE = ("schedule", "decay_iters", "min_lr")
# evaluations of a run are compared: they read the same sample in the same way; and its moments are
# those of its optimizers (muon_split may change: they are of the whole weight)
KEPT = ("eval_tokens", "mask_documents", "optimizer", "gate_optimizer")
OF_ADAMW = ("exp_avg", "exp_avg_sq")
MEAN_OF = {torch.optim.AdamW: "exp_avg", Muon: "momentum_buffer"}  # what each keeps of a gradient
# seconds that init_from=auto waits for the lock: a file server may not know yet that a machine is
# gone (NFS 4: 90)
LOCK_WAIT = 120.0
# (key, value): values that stand for what the run has derived
DERIVED = (("dtype", "auto"), ("vocab_size", None), ("head_dim", None))


class Start(NamedTuple):
    """How a run starts."""

    config: TrainConfig
    user_keys: dict  # of config files and of the command line
    resumed: dict | None = None  # the checkpoint that it goes on from
    source: dict | None = None  # the one whose weights it starts from
    notes: list[str] = []  # lines to print


def where_to_start(user_keys: dict) -> Start:
    """The start of the run that the keys of config files and of the command line ask for. Raises
    UserError."""
    user_keys = without_alias(user_keys)
    init_from = user_keys.get("init_from", TrainConfig.init_from)
    file = Path(user_keys.get("out_dir", TrainConfig.out_dir)) / "ckpt.pt"
    if init_from == "auto" and os.path.isfile(file.with_name("lock")):
        # a job may still be writing the ckpt.pt
        try:
            files.lock(file.parent).close()
        except files.InUse as error:
            print(f"waiting up to {LOCK_WAIT:g} s for the lock: {error}", flush=True)
            files.lock(file.parent, LOCK_WAIT).close()
    if init_from == "resume" or init_from == "auto" and os.path.isfile(file):
        return go_on(user_keys, file)
    if init_from in ("scratch", "auto"):
        config = configurator.build(TrainConfig, user_keys)
        if config.keep_moments:
            raise UserError(
                f"keep_moments=True: init_from={init_from!r} has none; name a run's ckpt.pt there"
            )
        return Start(config, user_keys)
    return start_from_weights(user_keys, init_from)


# -- A run that goes on ----------------------------------------------------------------------------


def go_on(user_keys: dict, file: Path) -> Start:
    """The start of a run that goes on from this ckpt.pt."""
    resumed = checkpoints.load(file, mapped=True)
    for name in NEEDED:
        if name not in resumed:
            raise UserError(
                f"{file}: has no {name}, which a resume needs; --init_from={file} starts a new run "
                "from its weights, in another out_dir"
            )
    saved = dataclasses.asdict(configurator.build(TrainConfig, resumed["config"], str(file)))
    before = {name: value for name, value in saved.items() if name not in OF_THIS_START}
    fixed = model_keys(resumed, file) | {name: before[name] for name in KEPT}
    fixed["dtype"] = resumed["dtype"]
    for name, had in fixed.items():
        asked = user_keys.get(name, had)
        if asked != had and (name, asked) not in DERIVED:
            raise UserError(
                f"{name}={asked}: {file} has {had}, which a resumed run keeps; leave it out, or "
                "the config file that has it"
            )
    schedule = user_keys.get("schedule", before["schedule"])
    values = dict(before)
    if schedule != before["schedule"]:
        # a new schedule replaces all that the checkpoint says of its own
        values |= dict.fromkeys(OF_SCHEDULE)
    config = configurator.build(TrainConfig, values | user_keys | fixed, source=str(file))
    check_place_in_data(config, before, resumed, file)
    notes = [f"resuming {config.out_dir} at step {resumed['iter_num']}"]
    then = resumed["code_files"]
    now = code_sha256()[1]
    changed = sorted(name for name in then | now if then.get(name) != now.get(name))
    if changed:
        notes.append(f"the code has changed since this checkpoint: {', '.join(changed)}")
    notes += differences(config, user_keys, before, "the checkpoint")
    return Start(config, user_keys, resumed=resumed, notes=notes)


def check_place_in_data(config: TrainConfig, before: dict, resumed: dict, file: Path) -> None:
    """UserError for another number of rows a step, and for a max_iters before the checkpoint's
    step."""
    had = before["batch_size"] * before["gradient_accumulation_steps"]
    asked = config.batch_size * config.gradient_accumulation_steps
    if asked != had:
        raise UserError(
            f"batch_size={config.batch_size}, "
            f"gradient_accumulation_steps={config.gradient_accumulation_steps}: {file} has {had} "
            f"rows a step, which a resumed run keeps, and not {asked}: its place in the data is "
            f"the step times the rows; in another out_dir, --init_from={file} "
            "--keep_moments=true goes on with other rows"
        )
    if resumed["iter_num"] > config.max_iters:
        raise UserError(
            f"max_iters={config.max_iters}: {file} is at step {resumed['iter_num']} already"
        )


# -- A run that starts from the weights of another -------------------------------------------------


def start_from_weights(user_keys: dict, path: str) -> Start:
    """The start of a run from another's weights, with its keys of the model."""
    source = checkpoints.load(path, mapped=True)
    of_model = model_keys(source, path)
    config = configurator.build(TrainConfig, of_model | user_keys, source=path)
    if files.find_checkpoint(path).resolve().parent == Path(config.out_dir).resolve():
        raise UserError(
            f"init_from={path}: lies in out_dir, where a new run replaces it; give another out_dir"
        )
    if config.rope_scaling in WITH_ROPE_LENGTH:  # whatever the block_size from here on
        config.rope_length = config.rope_length or of_model["block_size"]
    had = of_model["gate_activation"]
    has_gates = any(gate.positions for _, gate in configurator.build(GPTConfig, of_model).layers())
    if has_gates and config.gate_activation != had:
        raise UserError(
            f"gate_activation={config.gate_activation!r}: would change the gates that {path} has: "
            f"{had!r}"
        )
    notes = differences(config, user_keys, of_model, path)
    if config.keep_moments:
        check_has_moments(config, source, path)
        notes.append(
            f"with the moments that the optimizer of {path} had at step {source['iter_num']}"
        )
    return Start(config, user_keys, source=source, notes=notes)


def check_has_moments(config: TrainConfig, source: dict, path: str) -> None:
    """UserError for a source without the moments of this run's optimizer."""
    for name in ("optimizer", "config", "iter_num"):
        if name not in source:
            raise UserError(
                f"keep_moments=True: {path} has no {name}; a run's ckpt.pt or best.pt has it"
            )
    had = configurator.build(TrainConfig, source["config"], source=path).optimizer
    if had != config.optimizer:
        raise UserError(
            f"keep_moments=True: {path} has the moments of {had}, not of "
            f"optimizer={config.optimizer}"
        )


def differences(config: TrainConfig, user_keys: dict, before: dict, where: str) -> list[str]:
    """Lines about the keys that a user gave and that differ from what a checkpoint has."""
    lines = []
    for name, had in before.items():
        now = getattr(config, name)
        if name in user_keys and now != had:
            lines.append(f"{name}: {now}, where {where} has {had}")
    return lines


def model_keys(checkpoint: dict, path: Path | str) -> dict:
    """{key of the model: value} of a checkpoint, but for kernels, which this machine may lack."""
    saved = checkpoint["model_args"] | {"kernels": GPTConfig.kernels}
    keys = dataclasses.asdict(configurator.build(GPTConfig, saved, source=str(path)))
    del keys["kernels"]
    return keys


@torch.no_grad()
def take_weights(model: GPT, weights: dict[str, torch.Tensor], path: str) -> list[str]:
    """Copies the weights of the same name and shape into the model. Returns lines to print. Raises
    UserError where none fits, or where a new gate would change what a trained mixer computes."""
    state = model.state_dict()
    fitting = {}
    for name, value in weights.items():
        if name in state and state[name].shape == value.shape:
            fitting[name] = value
    if not fitting:
        raise UserError(f"init_from={path!r}: none of its weights fit this model")
    for i, block in enumerate(model.blocks):
        mixer = f"blocks.{i}.mixer."
        if not any(name.startswith(mixer) for name in fitting):
            continue  # the whole mixer is new, with its gates
        lost = [x for x in weights if x.startswith(f"{mixer}gates.") and x not in fitting]
        for place, gate in block.named_modules():
            if isinstance(gate, Gate):
                names = [f"blocks.{i}.{place}.{name}" for name in gate.state_dict()]
                if not all(name in fitting for name in names):
                    check_new_gate(gate, place, lost, model.config.n_embd, path)
    # new tables beside trained embeddings start at zero, so that the model computes what it did
    if "wte.weight" in fitting:
        for name in state:
            if name.startswith("ngrams.") and name not in fitting:
                state[name] = torch.zeros_like(state[name])
    model.load_state_dict(state | fitting)
    new_parameters = [name for name in state if name not in fitting]
    unused = [name for name in weights if name not in fitting]
    notes = [f"starting from {path}: {len(fitting)} of {len(state)} tensors taken"]
    if new_parameters:
        names = ", ".join(new_parameters)
        notes.append(f"  initialised anew, missing there or of another shape: {names}")
    if unused:
        notes.append(f"  left out: {', '.join(unused)}")
    return notes


def check_new_gate(gate: Gate, place: str, lost: list[str], n_embd: int, path: str) -> None:
    """UserError for a new gate in a trained layer that does not start as the identity, or in whose
    place a trained one is lost."""
    if lost:
        raise UserError(f"{path}: has a trained gate ({lost[0]}) that would be lost to a new one")
    value = gate.value(gate.logits(torch.ones(1, 1, n_embd)))
    identity = 1.0 if gate.is_factor else 0.0
    if (value != identity).any():
        name = place.removeprefix("mixer.gates.")
        raise UserError(
            f"gate {name}: a new gate would start at {value.flatten()[0]:.3g}, not {identity:g}, "
            f"and change what {path} computes; --gate_activation=sigmoid2 without a gate_bias "
            "starts as the identity"
        )


# -- What is checked before anything is written ----------------------------------------------------


def check_same_start(start: Start, processes: Processes) -> None:
    """UserError, on all processes, unless they start in the same way: machines may see other
    files, and be given other keys."""
    config = start.config
    paths = ["dataset", "out_dir"]  # what lies there is compared instead
    which_checkpoint = None
    if start.resumed is not None:
        which_checkpoint = (start.resumed["run_id"], start.resumed["iter_num"])
    if start.source is not None:
        paths.append("init_from")
    keys = dataclasses.asdict(config) | dict.fromkeys((*paths, "threads"))
    advice = "all machines must see the same out_dir; with init_from=auto they then all resume, or all start"
    processes.check_same(which_checkpoint, f"the ckpt.pt of {config.out_dir}", advice)
    processes.check_same(keys, "the config", "start all processes with the same keys")
    processes.check_same(code_sha256()[1], "the code", "give all machines the same code")
    if start.source is not None:
        sha256 = files.sha256_of_file(files.find_checkpoint(config.init_from))
        advice = "give all machines the same file, one that no run writes to meanwhile"
        processes.check_same(sha256, config.init_from, advice)
    check_micro_steps(config, processes.world_size)


def open_data(start: Start, processes: Processes) -> Dataset:
    """The data of the run. UserError, on all processes, for data that it cannot train on."""
    config, resumed, source = start.config, start.resumed, start.source
    dataset = open_dataset(config.dataset, config.mask_documents)
    if config.mask_documents and not dataset.mask_documents:
        raise UserError(
            f"mask_documents=True: {dataset.folder} has rows and no documents; leave mask_documents out"
        )
    if config.mask_documents:
        check_documents(config)
    processes.check_same(
        dataset.sha256, f"dataset={config.dataset!r}", "give all machines the same data"
    )
    if source is not None:
        check_same_meaning(source, dataset)
    if resumed is not None and resumed["data"].get("sha256") != dataset.sha256:
        raise UserError(
            f"{config.dataset}: not the data that {Path(config.out_dir) / 'ckpt.pt'} was trained on"
        )
    # both raise for data without a single row; a stream is validated in windows that may be shorter
    # than block_size
    dataset.examples_per_epoch("train", config.block_size)
    is_row = dataset.kind == "examples" or dataset.mask_documents
    dataset.examples_per_epoch("val", config.block_size if is_row else 1)
    if config.vocab_size is not None and config.vocab_size < dataset.vocab_size:
        raise UserError(
            f"vocab_size={config.vocab_size}: {dataset.folder} has ids up to {dataset.vocab_size - 1}"
        )
    return dataset


# -- Moments, rates and random state ---------------------------------------------------------------


def check_moments(optimizers: list[torch.optim.Optimizer], moments: dict) -> None:
    """Raises ValueError for moments {name: {"exp_avg": tensor ...}} that are not those of these
    optimizers: AdamW's fused kernel would write past the end of a smaller tensor."""
    parameters: dict = {}
    needed: dict = {}  # {name: the moment without which its optimizer makes no step}
    for optimizer in optimizers:
        own = dict(named_parameters(optimizer))
        parameters |= own
        if type(optimizer) in MEAN_OF:
            needed |= dict.fromkeys(own, MEAN_OF[type(optimizer)])
    if moments.keys() != parameters.keys():
        raise ValueError(
            f"its optimizer has {len(moments)} parameters, of other names than the model's"
        )
    for name, parameter in parameters.items():
        mean = needed.get(name)
        if mean is not None and moments[name] and mean not in moments[name]:
            raise ValueError(f"{name} was stepped by another optimizer: its moments have no {mean}")
        for part, tensor in moments[name].items():
            reason = wrong_tensor(tensor)
            if not reason and tensor.shape != parameter.shape:
                if tensor.dim() or part in OF_ADAMW:  # a step is one number
                    reason = f"has the shape {tuple(tensor.shape)}"
            if reason:
                raise ValueError(f"its optimizer's {part} of {name} {reason}")


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
