"""Which keys a user gave have no effect: a run names them at its start, since nothing else would tell."""

from model import MIXERS, GatedDeltaNet, GPTConfig, Softmax


def notes_on_keys(config, new: list[str]) -> list[str]:
    """A line of text for each key that was given and has no effect in this run.

    new: the names of the parameters that the weights it started from lack
    """
    unused = unused_keys(config)
    if not config.decay_lr:
        unused |= dict.fromkeys(("min_lr", "lr_decay_iters"), "decay_lr is false")
    if not new:
        unused["new_lr_scale"] = "no checkpoint lacks a parameter of this model"
    if config.parallel == "ddp":
        unused["shards"] = "parallel is ddp"
    given = [name for name in unused if name in getattr(config, "given", ())]
    return [f"note: {name}={getattr(config, name)} changes nothing: {unused[name]}" for name in given]


def unused_keys(config: GPTConfig) -> dict[str, str]:
    """{key: reason} of each key of GPTConfig that has no effect in this model, whatever its value."""
    layers = [(MIXERS[name], gate) for name, gate in config.layers()]
    mixers, unused = {mixer for mixer, _ in layers}, {}
    for name in dict.fromkeys(name for mixer in MIXERS.values() for name in mixer.keys):
        if not any(name in mixer.keys for mixer in mixers):
            unused[name] = "read only by " + ", ".join(each for each, mixer in MIXERS.items() if name in mixer.keys)
    if config.position != "learned" and Softmax not in mixers:
        unused["position"] = "only softmax layers have RoPE"
    if Softmax in mixers and config.position != "rope":
        unused |= dict.fromkeys(Softmax.rope_keys, f"position is {config.position}")
    elif Softmax in mixers:
        unused |= {"rope_factor": "rope_scaling is none"} if config.rope_scaling == "none" else {}
        unused |= {"rope_scaling": "rope_factor is 1"} if config.rope_factor == 1 else {}
        unused |= {} if config.rope_scaling == "yarn" else {"rope_length": f"rope_scaling is {config.rope_scaling}"}
        unused |= {"rope_length": "rope_factor is 1"} if config.rope_factor == 1 else {}
    if mixers == {GatedDeltaNet} and config.delta_key_dim and config.delta_value_dim:
        unused["head_dim"] = "delta_key_dim and delta_value_dim are given"
        unused |= {"n_head": "delta_heads is given"} if config.delta_heads else {}
    unused |= {"mlp_ratio": "mlp_width gives the MLP's width"} if config.mlp_width else {}
    positions = {position for _, gate in layers for position in gate.positions}
    if not positions:
        unused |= dict.fromkeys(("gate_activation", "gate_rank", "gate_input", "gate_bias"), "gate is none or native")
    elif config.gate_input == "static":
        unused["gate_rank"] = "gate_input is static"
    if "readout" not in positions:
        unused["norm_first"] = "there is no gate at the readout"
    asked_for_native = [mixer for mixer, gate in layers if gate.native]
    has_native = any(mixer.native_gate for mixer in asked_for_native)
    if asked_for_native and not has_native:
        unused["gate"] = f"{config.attention} was published without a gate, so native means none"
    if not positions and not has_native:
        unused["match_params"] = "there is no gate"
    return unused
