"""Which keys a user gave have no effect: a run names them at its start, since nothing else would
tell."""

import dataclasses
from typing import Any

import torch

from keys import WITH_ROPE_LENGTH, word_of
from model import GPT, MIXERS, GPTConfig
from runs.memory import NoRandomStart

OF_GATES = ["gate_lr_scale", "gate_weight_decay", "gate_optimizer"]
# read by the start of the weights, the data and the output
NOT_SEEN = {"init", "block_size", "logit_softcap"}


def notes_on_keys(config, resumes: bool, new: list[str]) -> list[str]:
    """A line of text for each key that was given and has no effect in this run, and for a warmup
    that is longer than the run. new: the parameters that the weights it started from lacked."""
    unused = unused_keys(config) | reasons(
        (["min_lr", "lr_decay_iters"], config.decay == "constant", "schedule is constant"),
        (["muon_lr_scale", "gate_optimizer"], config.optimizer == "adamw", "optimizer is adamw"),
        (
            OF_GATES,
            not any(gate.native or gate.positions for _, gate in config.layers()),
            "there is no gate",
        ),
        (["new_lr_scale"], not new, "no parameter is new beside a checkpoint's"),
        (["keep_moments"], resumes, "the run goes on with its own"),
    )
    given = [name for name in unused if name in config.given]
    notes = [
        f"note: {name}={getattr(config, name)} changes nothing: {unused[name]}" for name in given
    ]
    steps, warmup = config.max_iters, config.warmup_iters
    if warmup > steps:
        reached = f"{steps / (warmup + 1):.0%} of learning_rate={config.learning_rate:g}"
        notes.append(
            f"note: warmup_iters={warmup} is longer than the run of {steps} steps, which reaches {reached}"
        )
    return notes


def unused_keys(config: GPTConfig) -> dict[str, str]:
    """{key: reason} of each key of GPTConfig that has no effect in this model, whatever its
    value."""
    read = NOT_SEEN | keys_read(config)
    unused = {
        field.name: "no layer reads it"
        for field in dataclasses.fields(GPTConfig)
        if field.name not in read
    }
    positions = {position for _, gate in config.layers() for position in gate.positions}
    asked = [MIXERS[name].native_gate for name, gate in config.layers() if gate.native]
    turns, scaling = "rope_scaling" in read, config.rope_scaling
    return unused | reasons(
        (["rope_factor"], turns and scaling == "none", "rope_scaling is none"),
        (["rope_length"], turns and scaling not in WITH_ROPE_LENGTH, f"rope_scaling is {scaling}"),
        (["rope_scaling", "rope_length"], turns and config.rope_factor == 1, "rope_factor is 1"),
        (["gate_rank"], config.gate_input == "static", "gate_input is static"),
        (
            ["gate_activation", "gate_rank", "gate_input", "gate_bias"],
            not positions,
            "gate is none or native",
        ),
        (["norm_first"], "readout" not in positions, "there is no gate at the readout"),
        (
            ["gate"],
            asked and not any(asked) and not positions,
            f"{config.attention} was published without a gate",
        ),
        (["match_params"], not positions and not any(asked), "there is no gate"),
    )


def reasons(*rows: tuple[list[str], Any, str]) -> dict[str, str]:
    """{key: reason} of rows (keys, whether they have no effect, reason); the last reason counts."""
    return {
        name: reason for names, has_no_effect, reason in rows if has_no_effect for name in names
    }


def keys_read(config: GPTConfig) -> set[str]:
    """The names of what the model and one layer of each kind read of a config; all if one of them
    fails."""
    read = set()

    class Watched(type(config)):  # type: ignore[misc]
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    watched = object.__new__(Watched)
    watched.__dict__.update(vars(config), vocab_size=config.vocab_size or 1)
    kinds = {
        (repr(layer), word_of(config.position, i)): (i, *layer)
        for i, layer in enumerate(config.layers())
    }
    try:
        with torch.random.fork_rng(devices=[]), NoRandomStart():  # a GPT draws its seed
            with torch.device("meta"):
                GPT(watched)
            if config.position != "learned":
                read.discard("position")  # the model asks whether to make an embedding
            for i, name, gate in kinds.values():  # on the CPU: a mixer may ask for a value
                mixer = MIXERS[name](watched, gate)
                mixer.layer = i
                mixer(torch.zeros(1, 1, config.n_embd))
    except Exception:  # the code of a mixer may be anybody's
        return {field.name for field in dataclasses.fields(config)}
    return read
