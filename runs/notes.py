"""What a run prints at its start: what is trained, on what, and which keys that a user gave have no
effect, since nothing else would tell. Where a mixer is not of this repository, no key of mixers is
named: it may read any."""

from collections import Counter
from typing import Any

import torch

from keys import SOFTMAX, GPTConfig, TrainConfig
from model import GPT, MIXERS

DELTA_RULE = {"deltanet", "gated_deltanet", "gated_deltanet2", "deltaproduct", "kda", "kda_fla"}
MAMBA = {"mamba2", "mamba3"}
OURS = SOFTMAX | DELTA_RULE | MAMBA | {"cosformer", "gla", "monarch"}


def print_start(run: Any, start: Any, notes_of_model: list[str]) -> None:
    """Prints what is trained, on what, and what of it may be a mistake. run: train.Run."""
    config, model, dataset, processes = run.config, run.model, run.dataset, run.processes
    for note in start.notes + notes_of_model:
        print(note)
    print(model_line(model))
    perfect = dataset.perfect_loss("val")
    reached = ""
    if perfect is not None:
        reached = f", the perfect predictor's validation loss is {perfect:.4f}"
    print(
        f"data: {dataset.folder}, {dataset.vocab_size:,} ids, {run.tokens_per_step:,} tokens a step{reached}"
    )
    kind = f", {config.parallel}" if processes.world_size > 1 else ""
    print(
        f"device: {processes.device_type}, {run.dtype}, {processes.world_size} process(es) of "
        f"{processes.threads} threads{kind}, compile {run.compiled}, torch {torch.__version__}"
    )
    peak, source = run.peak
    print(f"MFU: against {peak / 1e12:.3g} TFLOP/s a process, {source}")
    steps = config.max_iters - run.step
    tokens = steps * run.tokens_per_step
    hours = tokens * run.flops_per_token / (peak * processes.world_size) / 3600
    advice = ""
    if processes.device_type == "cpu" and hours > 1:
        advice = "; config/pystdlib.py trains a small model in a minute"
    print(f"steps: {steps:,}, {tokens:,} tokens; at that peak they take {hours:.2g} hours{advice}")
    for note in notes_on_keys(config, start.user_keys, start.resumed is not None):
        print(note)
    if run.eval_tokens != config.eval_tokens:
        print(
            f"note: the run is shorter than eval_interval={config.eval_interval}: evaluations read "
            f"{run.eval_tokens:,} tokens, a tenth of what it trains on, and not "
            f"{config.eval_tokens:,}"
        )


def model_line(model: GPT) -> str:
    """The model in a line."""
    config = model.config
    return (
        f"model: {config.n_layer} x {config.n_embd}, {config.attention}, gate {config.gate}, "
        f"{model.n_params():,} parameters, {model.flops_per_token() / 1e6:,.1f} MFLOPs a token forward, "
        f"state {model.state_bytes():,} bytes a sequence"
    )


def unused_keys(config: GPTConfig) -> dict[str, str]:
    """{key: reason} of the keys of GPTConfig that have no effect in this model, whatever their
    value."""
    mixers = set()
    positions = set()  # of gates
    has_native = False  # a gate that a mixer was published with
    for name, gate in config.layers():
        mixers.add(name)
        positions.update(gate.positions)
        has_native |= gate.native and MIXERS[name].native_gate is not None
    is_ours = mixers <= OURS
    no_softmax = is_ours and not mixers & SOFTMAX
    no_rope = is_ours and (no_softmax or "rope" not in config.position)
    no_delta = is_ours and not mixers & DELTA_RULE
    no_sizes = no_delta and "gla" not in mixers
    no_mamba = is_ours and not mixers & MAMBA
    rope = "rope_base rope_scaling rope_factor rope_length rope_restarts"
    rows = [
        (no_softmax, "n_kv_head qk_norm window", "no layer is softmax"),
        (no_softmax and config.position != "learned", "position", "no layer is softmax"),
        (no_rope, rope, "no layer has RoPE"),
        (no_delta, "beta_max", "no layer has the delta rule"),
        (no_sizes, "delta_sizes", "no layer has the delta rule, or is gla"),
        (no_mamba, "expand state_size", "no layer is mamba2 or mamba3"),
        (config.mlp == "none", "mlp_ratio", "mlp is none"),
        (config.gate_input == "static", "gate_rank gate_width", "a static gate has no W_g"),
        (
            not positions,
            "gate_activation gate_rank gate_width gate_input gate_bias",
            "there is no gate",
        ),
        ("readout" not in positions, "norm_first", "there is no gate at the readout"),
        (not positions and not has_native, "match_params", "there is no gate"),
    ]
    return reasons(rows)


def notes_on_keys(config: TrainConfig, user_keys: dict, resumes: bool) -> list[str]:
    """A line of text for each key that a user gave and that has no effect in this run, and for a
    warmup that is longer than the run."""
    gates = [gate for _, gate in config.layers() if gate.native or gate.positions]
    rows = [
        (config.schedule == "constant", "min_lr", "schedule is constant"),
        (
            config.optimizer == "adamw",
            "muon_lr_scale muon_split gate_optimizer",
            "optimizer is adamw",
        ),
        (not gates, "gate_lr_scale gate_weight_decay gate_optimizer", "there is no gate"),
        (resumes, "keep_moments", "the run goes on with its own"),
        (not config.mask_documents, "rope_restarts", "mask_documents is false"),
    ]
    notes = []
    for name, reason in (unused_keys(config) | reasons(rows)).items():
        if name in user_keys:
            notes.append(f"note: {name}={getattr(config, name)} changes nothing: {reason}")
    if config.warmup_iters > config.max_iters:
        notes.append(
            f"note: warmup_iters={config.warmup_iters} is longer than the run of "
            f"{config.max_iters} steps, which does not reach learning_rate={config.learning_rate:g}"
        )
    return notes


def reasons(rows: list[tuple]) -> dict[str, str]:
    """{key: reason} of rows (whether they have no effect, keys, reason)."""
    found: dict = {}
    for has_no_effect, names, reason in rows:
        if has_no_effect:
            found |= dict.fromkeys(names.split(), reason)
    return found


def forms_that_ran(model: GPT) -> list[str]:
    """A line for each form of the recurrence that layers took in the last pass. On a GPU the forms
    differ several times in speed, and nothing else would tell that a layer has a slow one."""
    counts = Counter(block.mixer.form for block in model.blocks if block.mixer.form)
    n_layer = len(model.blocks)
    return [f"recurrence: {form}, in {n} of {n_layer} layers" for form, n in counts.items()]
