"""Which keys a user gave have no effect: a run names them at its start, since nothing else would
tell. The tables say what the mixers of this repository read. A mixer of your own may read any key:
where there is one, no key of mixers is named."""

from keys import CLASS_OF, WITH_ROPE_LENGTH, GPTConfig, TrainConfig, word_of
from model import GPT, MIXERS

OF_ROPE = {"rope_base", "rope_scaling", "rope_factor", "rope_length"}
OF_DELTA_RULE = {"beta_max", "delta_sizes"}
OF_SOFTMAX = ("softmax", *CLASS_OF.values())  # and its variants
READ_BY = {  # the keys that some mixers read and others don't
    **dict.fromkeys(
        OF_SOFTMAX,
        {"n_kv_head", "qk_norm", "window", "position", *OF_ROPE},
    ),
    "cosformer": {"levels"},
    "gla": {"levels", "delta_sizes"},
    "mamba2": {"levels", "expand", "state_size"},
    "mamba3": {"expand", "state_size"},
    "gated_deltanet": {"levels", *OF_DELTA_RULE},
    "deltanet": {"levels", *OF_DELTA_RULE},
    "kda": {"levels", *OF_DELTA_RULE},
    "kda_fla": {"levels", *OF_DELTA_RULE},
    "gated_deltanet2": {"levels", *OF_DELTA_RULE},
    "deltaproduct": OF_DELTA_RULE,
    "monarch": set(),
}  # fmt: skip
WITH_SIZES = {name for name, keys in READ_BY.items() if "delta_sizes" in keys}
OF_GATES = {"gate_activation", "gate_rank", "gate_input", "gate_bias"}


def notes_on_keys(
    config: TrainConfig, user_keys: dict, resumes: bool, new_parameters: list[str]
) -> list[str]:
    """A line of text for each key that a user gave and that has no effect in this run, and for a
    warmup that is longer than the run."""
    unused = unused_keys(config) | unused_keys_of_training(config, resumes, new_parameters)
    notes = []
    for name, reason in unused.items():
        if name in user_keys:
            notes.append(f"note: {name}={getattr(config, name)} changes nothing: {reason}")
    steps = config.max_iters
    warmup = config.warmup_iters
    if warmup > steps:
        reached = f"{steps / (warmup + 1):.0%} of learning_rate={config.learning_rate:g}"
        notes.append(
            f"note: warmup_iters={warmup} is longer than the run of {steps} steps, which reaches {reached}"
        )
    return notes


def forms_that_ran(model: GPT) -> list[str]:
    """A line for each form of the recurrence that layers took in the last pass. On a GPU the forms
    differ several times in speed, and nothing else would tell that a layer has a slow one."""
    counts: dict = {}
    for block in model.blocks:
        if block.mixer.form:
            counts[block.mixer.form] = counts.get(block.mixer.form, 0) + 1
    return [
        f"recurrence: {form}, in {n} of {len(model.blocks)} layers" for form, n in counts.items()
    ]


def unused_keys(config: GPTConfig) -> dict[str, str]:
    """{key: reason} of each key of GPTConfig that has no effect in this model, whatever its
    value."""
    layers = config.layers()
    mixers = {name for name, _ in layers}
    positions = set()
    for _, gate in layers:
        positions.update(gate.positions)
    native = [MIXERS[name].native_gate is not None for name, gate in layers if gate.native]
    softmax = []  # of each such layer, what `position` says
    for i, (name, _) in enumerate(layers):
        if name in OF_SOFTMAX:
            softmax.append(word_of(config.position, i))
    scaling = config.rope_scaling

    unused = {}
    if mixers <= READ_BY.keys():
        every = set().union(*READ_BY.values())
        read = set().union(*(READ_BY[name] for name in mixers))
        if "rope" not in softmax:
            read -= OF_ROPE
        if config.position == "learned":
            read.add("position")  # the model's, in front of any mixer
        unused = dict.fromkeys(sorted(every - read), "no layer reads it")
    has_rope = "rope_scaling" not in unused
    has_sizes = config.delta_sizes is not None and mixers <= WITH_SIZES
    rows = [
        (config.mlp == "none", ["mlp_ratio"], "mlp is none"),
        (has_sizes, ["n_head", "head_dim"], "delta_sizes is given"),
        (has_rope and scaling == "none", ["rope_factor"], "rope_scaling is none"),
        (
            has_rope and scaling not in WITH_ROPE_LENGTH,
            ["rope_length"],
            f"rope_scaling is {scaling}",
        ),
        (has_rope and config.rope_factor == 1, ["rope_scaling", "rope_length"], "rope_factor is 1"),
        (config.gate_input == "static", ["gate_rank"], "gate_input is static"),
        (not positions, OF_GATES, "gate is none or native"),
        ("readout" not in positions, ["norm_first"], "there is no gate at the readout"),
        (
            native and not any(native) and not positions,
            ["gate"],
            f"{config.attention} was published without a gate",
        ),
        (not positions and not any(native), ["match_params"], "there is no gate"),
    ]
    return unused | reasons(rows)


def unused_keys_of_training(config: TrainConfig, resumes: bool, new_parameters: list[str]) -> dict:
    """{key: reason} of each key of training that has no effect in this run."""
    has_gates = any(gate.native or gate.positions for _, gate in config.layers())
    rows = [
        (config.decay == "constant", ["min_lr", "lr_decay_iters"], "schedule is constant"),
        (config.optimizer == "adamw", ["muon_lr_scale", "gate_optimizer"], "optimizer is adamw"),
        (
            not has_gates,
            ["gate_lr_scale", "gate_weight_decay", "gate_optimizer"],
            "there is no gate",
        ),
        (not new_parameters, ["new_lr_scale"], "no parameter is new beside a checkpoint's"),
        (resumes, ["keep_moments"], "the run goes on with its own"),
    ]
    return reasons(rows)


def reasons(rows: list[tuple]) -> dict[str, str]:
    """{key: reason} of rows (whether they have no effect, keys, reason); the last reason counts."""
    found = {}
    for has_no_effect, names, reason in rows:
        if has_no_effect:
            found |= dict.fromkeys(names, reason)
    return found
