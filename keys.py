"""The keys of a model and of a run, each with its default, its help and what it may be. No torch is
imported here.

`python train.py --help` prints them; GPTConfig has those of the model alone. A new key is one line.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

from base.configurator import UserError, check, check_choice, key
from base.files import find_checkpoint, find_data

DTYPES = ("float32", "bfloat16", "float16")  # of matrix products
# values of rope_scaling that ask for rope_length
WITH_ROPE_LENGTH = ("yarn", "llama3")
ROPE_SCALINGS = ("none", "ntk", "linear", *WITH_ROPE_LENGTH)
# names that transformers, fla, nanoGPT and others have for a key: what it is called here
ELSEWHERE = {
    "hidden_size": "n_embd", "d_model": "n_embd", "num_hidden_layers": "n_layer", "num_layers": "n_layer",
    "num_attention_heads": "n_head", "num_heads": "n_head", "num_key_value_heads": "n_kv_head",
    "num_kv_heads": "n_kv_head", "intermediate_size": "mlp_ratio, a multiple of n_embd", "hidden_ratio": "mlp_ratio",
    "hidden_act": "mlp",
    "max_position_embeddings": "block_size", "seq_len": "block_size", "context_length": "block_size",
    "rms_norm_eps": "norm_eps", "layer_norm_epsilon": "norm_eps", "rope_theta": "rope_base",
    "partial_rotary_factor": "attention=qwen3_next, or a subclass",
    "tie_word_embeddings": "tie_embeddings", "sliding_window": "window",
    "window_size": "window", "attn": "attention", "mixer": "attention", "attn_mode": "kernels",
    "attn_implementation": "kernels", "use_output_gate": "gate=native", "use_gate": "gate=native",
    "attn_output_gate": "gate=elementwise", "conv_size": "short_conv", "conv_kernel": "short_conv",
    "d_conv": "short_conv", "d_state": "state_size", "ssm_state_size": "state_size", "allow_neg_eigval": "beta_max=2",
    "lr": "learning_rate", "max_steps": "max_iters", "warmup_steps": "warmup_iters", "max_grad_norm": "grad_clip",
    "lr_scheduler_type": "schedule", "per_device_train_batch_size": "batch_size", "output_dir": "out_dir",
    "gradient_checkpointing": "activation_checkpointing", "resume_from_checkpoint": "init_from=resume",
    "sink": "attention=sink_head", "forget_gate": "attention=fox", "attention_weights": "attention=softpick",
    "attention_softcap": "attention=softcap", "n_householder": "a subclass of DeltaProduct (variants.py)",
    "qkv_bias": "attention=qwen2", "rope_fraction": "attention=qwen3_next, or a subclass",
    "readout_activation": "attention=silu_readout", "native_bias": "attention=kda_fla",
    "mlp_width": "mlp_ratio, a multiple of n_embd", "pad_vocab_to": "vocab_size",
    "delta_heads": "delta_sizes", "delta_key_heads": "delta_sizes", "delta_key_dim": "delta_sizes",
    "delta_value_dim": "delta_sizes",
    "n_positions": "block_size", "always_save_checkpoint": "always done, every save_interval",
    "eval_iters": "eval_tokens", "eval_only": "evaluate.py", "wandb_log": "logger=wandb",
    "wandb_project": "logger=wandb, and WANDB_PROJECT in the environment", "wandb_run_name": "out_dir",
    "backend": "chosen by the device",
    "shards": "parallel=fsdp, with a shard on each process", "gather_dtype": "what dtype says",
    "checkpoint": "init_from=FILE; a checkpoint is always one file",
    "decay_lr": "schedule; decay_lr=False is schedule=constant", "lr_decay_iters": "max_iters",
    "new_lr_scale": "gate_lr_scale, of gates", "eval_batch_size": "what fits into a step's memory",
    "memory_check": "always done",
}  # fmt: skip
# keys of older checkpoints that are gone, and said nothing that a run or a model depends on
GONE = {"shards", "gather_dtype", "checkpoint", "eval_batch_size", "memory_check"}


GRANULARITIES = ("elementwise", "headwise", "shared", "scalar")  # of gates

# keys that are gone, or classes of variants.py by now: {key: (its value where it was not used, the
# last commit that had it)}
RETIRED = {
    "sink": ("none", "27a232e"),
    "attention_weights": ("softmax", "27a232e"),
    "forget_gate": (False, "27a232e"),
    "attention_softcap": (None, "27a232e"),
    "n_householder": (2, "27a232e"),
    "qkv_bias": (False, "3c5ad23"),
    "qk_norm_over": ("head", "3c5ad23"),
    "post_norm": (False, "3c5ad23"),
    "rope_fraction": (1.0, "3c5ad23"),
    "readout_activation": ("none", "3c5ad23"),
    "native_bias": (False, "3c5ad23"),
    "n_groups": (1, "3c5ad23"),
    "pad_vocab_to": (1, "3c5ad23"),
    "logit_softcap": (None, "3c5ad23"),
    "lr_decay_iters": (None, "65a93f7"),
}
CLASS_OF = {  # {(key, its value): the mixer that takes the place of softmax, or of kda for native_bias}
    ("sink", "zero"): "sink_zero",
    ("sink", "head"): "sink_head",
    ("sink", "token"): "sink_token",
    ("attention_weights", "softpick"): "softpick",
    ("forget_gate", True): "fox",
    ("attention_softcap", 50.0): "softcap",
    ("qkv_bias", True): "qwen2",
    ("rope_fraction", 0.25): "qwen3_next",
    ("readout_activation", "silu"): "silu_readout",
    ("native_bias", True): "kda_fla",
}
# softmax and its variants; kda_fla is one of kda, and xsa was never a key
SOFTMAX = {"softmax", "xsa", *CLASS_OF.values()} - {"kda_fla"}


class LayerGate(NamedTuple):
    """One layer's entry of the gate string."""

    native: bool  # whether it has the mixer's published gate
    positions: dict[str, str]  # {position: granularity}


def parse_gate(text: str) -> LayerGate:
    """Reads `none`, or terms joined by +, each `native` or GRANULARITY[@POSITION]. Raises
    UserError."""
    terms, positions = text.replace(" ", "").split("+"), {}
    for term in terms:
        if terms == ["none"] or (term == "native" and terms.count("native") == 1):
            continue
        name, _, position = (term if "@" in term else f"{term}@readout").partition("@")
        check_choice("gate", name, ("none", "native", *GRANULARITIES))
        if name not in GRANULARITIES or position in positions:
            raise UserError(
                f"gate={text!r}: {term!r} is one too many: a position has one gate, and 'none' stands alone"
            )
        positions[position] = name
    return LayerGate("native" in terms, positions)


def keys_of_today(keys: dict) -> dict:
    """The keys that an older checkpoint or row holds, as they are called today: the one place for
    this. Raises UserError for what the model no longer has."""
    keys = {name: value for name, value in keys.items() if name not in GONE}
    if keys.get("lr_decay_iters", 0) == keys.get("max_iters"):
        keys.pop("lr_decay_iters", None)
    for name, (unused, last) in RETIRED.items():
        value = keys.pop(name, unused)
        if value == unused:
            continue
        before = "kda" if name == "native_bias" else "softmax"
        mixer = CLASS_OF.get((name, value))
        words = [word.strip() for word in keys.get("attention", "softmax").split(",")]
        if mixer is None or before not in words:
            raise UserError(
                f"{name}={value!r}: not in this version; commit {last} is the last that has it"
            )
        keys["attention"] = ",".join(mixer if word == before else word for word in words)
    if not keys.pop("decay_lr", True):
        keys["schedule"] = "constant"
    elif keys.get("schedule", "") is None:
        keys["schedule"] = "cosine"
    rate_of_new = keys.pop("new_lr_scale", 1.0)  # only gates were new where a run had it
    if rate_of_new != 1:
        keys["gate_lr_scale"] = rate_of_new
    width = keys.pop("mlp_width", None)
    if width is not None:
        keys["mlp_ratio"] = mlp_ratio_of(width, keys["n_embd"], keys["mlp"])
    names = ("delta_key_heads", "delta_heads", "delta_key_dim", "delta_value_dim")
    key_heads, heads, key_dim, value_dim = (keys.pop(name, None) for name in names)
    if key_heads or heads or key_dim or value_dim:
        heads = heads or keys["n_head"]
        width = keys["head_dim"]
        keys["delta_sizes"] = [key_heads or heads, heads, key_dim or width, value_dim or width]
    return keys


def mlp_ratio_of(width: int, n_embd: int, mlp: str) -> float:
    """The mlp_ratio that gives an MLP of this hidden width."""
    n_matrices = 3 if mlp == "swiglu" else 2
    return width * n_matrices / 2 / n_embd


def find_start(init_from: str):
    """Raises UserError for an init_from that is neither a word nor a checkpoint."""
    return init_from in ("scratch", "resume", "auto") or find_checkpoint(init_from)


def word_of(pattern: str, layer: int) -> str:
    """What a pattern a,b,b says of a layer."""
    words = pattern.split(",")
    return words[layer % len(words)].strip()


def without_alias(keys: dict) -> dict:
    """The keys, in which attention=gated, BlaGPT's name for softmax with the gate of Qiu et al., is
    spelled out."""
    if keys.get("attention") != "gated":
        return keys
    gate = keys.get("gate", "none")
    return keys | {"attention": "softmax", "gate": "elementwise" if gate == "none" else gate}


@dataclass
class GPTConfig:
    """Every key of the model. Raises UserError for values that don't fit together."""

    elsewhere = ELSEWHERE
    # what only mixers and gates know of keys: functions of a config, to which model.py adds its own
    checks: ClassVar[list[Callable]] = []

    n_layer: int = key(12, "number of layers", at_least=1, at_most=10_000)
    n_head: int = key(12, "number of heads (mamba2, mamba3: expand times as many)", at_least=1)
    head_dim: int | None = key(None, "width of a head (None: n_embd / n_head)", at_least=1)
    n_kv_head: int | None = key(
        None, "number of key and value heads of softmax layers (None: n_head)", at_least=1
    )
    n_embd: int = key(768, "width of the residual stream", at_least=1)
    block_size: int = key(
        1024, "context length in tokens; also cosformer's M, the reach of its cosine", at_least=1
    )
    vocab_size: int | None = key(
        None, "number of token ids (None: as many as the data has)", at_least=1
    )
    mlp_ratio: float = key(
        4.0, "hidden width of the MLP, as a multiple of n_embd; swiglu: 2/3 of that", above=0
    )
    mlp: str = key(
        "gelu",
        "gelu: W gelu(U x); gelu_tanh: tanh in place of erf; swiglu: W (silu(G x) * U x); none",
    )
    tie_embeddings: bool = key(True, "one weight for the embedding and the output layer")
    norm: str = key(
        "rms",
        "norm before each branch and at the end: RMSNorm or LayerNorm",
        choices=("rms", "layer"),
    )
    norm_eps: float = key(1e-5, "the number under the root of every norm", above=0)
    bias: bool = key(
        False, "biases in softmax layers, MLPs and LayerNorms, as in GPT-2; other mixers have none"
    )
    dropout: float = key(
        0.0, "dropout on the embedding and on both residual branches", at_least=0, below=1
    )

    init: str = key(
        "normal", "start of weights: N(0, 0.02) or PyTorch's default", choices=("normal", "pytorch")
    )
    attention: str = key(
        "softmax",
        "mixer: softmax, cosformer, gla, mamba2, gated_deltanet, deltanet, kda, one of variants.py, or "
        "by layer a,b,b; gated: softmax with gate=elementwise",
    )
    position: str = key(
        "rope", "rope (in softmax layers only), learned or none, or by layer a,b of rope and none"
    )
    ngram_rows: int = key(
        0,
        "hashed embeddings of the last 2, 3 and 4 tokens, added to the token's: rows of each table (0: none)",
        at_least=0,
    )
    rope_base: float = key(10000.0, "base of RoPE's angles", above=1)
    rope_scaling: str = key(
        "none",
        "how RoPE is extended past block_size",
        choices=ROPE_SCALINGS,
    )
    rope_factor: float = key(1.0, "context extension factor, with rope_scaling", at_least=1)
    rope_length: int | None = key(
        None, "yarn, llama3: length RoPE was trained at (None: block_size)", at_least=1
    )
    rope_restarts: bool = key(
        True,
        "packed documents (mask_documents): RoPE counts from each one's start; false: the row's",
    )
    qk_norm: bool = key(False, "RMSNorm on q and k of softmax layers, before RoPE")
    window: str = key(
        "none",
        "softmax layers: keys that a query sees, its own included: none (all) or 128, or a,b,b",
    )
    short_conv: int | None = key(
        None,
        "width of the causal convolution on q, k, v (None: as published, 0: none)",
        at_least=0,
        at_most=1024,
    )
    expand: int = key(2, "mamba2, mamba3: inner width, as a multiple of n_embd", at_least=1)
    state_size: int = key(
        128, "mamba2, mamba3: width of B and C, the number of rows of a head's state", at_least=1
    )
    levels: str = key(
        "none",
        "log_linear: a state for each block of 1, 2, 4 ... past tokens; merged: a token is in the block it completes",
        choices=("none", "log_linear", "merged"),
    )
    beta_max: float = key(
        1.0, "delta rule: beta = this * sigmoid; 2 allows negative eigenvalues", choices=(1.0, 2.0)
    )
    delta_sizes: list[int] | None = key(
        None,
        "delta rule, gla: numbers of key heads (gla: not read) and of heads, widths of keys and of values "
        "(None: n_head,n_head,head_dim,head_dim)",
        at_least=1,
    )

    gate: str = key(
        "none",
        "none, native, GRANULARITY[@POSITION] joined by +, or a pattern a,b,b (docs/gates.md)",
    )
    gate_activation: str = key(
        "sigmoid", "how the gate's g acts on y: sigmoid, sigmoid2, silu ... (docs/gates.md)"
    )
    gate_rank: int = key(0, "rank of the gate's weight W_g (0: full rank)", at_least=0)
    gate_width: int | None = key(
        None,
        "first channels of the layer's normed input that W_g reads, such as 12 (None: all n_embd)",
        at_least=1,
    )
    gate_input: str = key(
        "token", "token: g = W_g x; static: a trained constant", choices=("token", "static")
    )
    gate_bias: float | None = key(
        None, "start of the gate's trained bias or static constant (None: no bias, or 0)"
    )
    readout_norm: str = key(
        "published", "norm of each mixer's readout: published, none, denominator or rms"
    )
    norm_first: bool = key(
        True, "true: the readout is normed, then gated; false: gated, then normed"
    )
    branch_scale: float = key(1.0, "fixed factor on the readout behind its norm and gates", above=0)
    out_init_scale: float = key(
        1.0, "factor on the start of each mixer's output projection", above=0
    )
    kernels: str = key(
        "auto", "code of the recurrence; auto: fla's, if on a GPU", choices=("auto", "torch", "fla")
    )
    match_params: bool = key(
        False, "narrow the MLP so that a gated model has as many parameters as the ungated one"
    )

    def __post_init__(self):
        check(self)
        vars(self).update(without_alias(vars(self)))
        if self.head_dim is None and self.n_embd % self.n_head:
            raise UserError(
                f"n_embd={self.n_embd}: must be a multiple of n_head={self.n_head}, or give head_dim"
            )
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.n_head % (self.n_kv_head or self.n_head):
            raise UserError(f"n_kv_head={self.n_kv_head}: must divide n_head={self.n_head}")
        if self.gate_width is not None and self.gate_width > self.n_embd:
            raise UserError(
                f"gate_width={self.gate_width}: must be at most n_embd={self.n_embd}, or None for all"
            )
        if not all(
            re.fullmatch(r"none|[1-9][0-9]{0,8}", word.strip()) for word in self.window.split(",")
        ):
            raise UserError(
                f"window={self.window!r}: must be none, a number from 1 on, or a pattern as 128,128,none"
            )
        words = self.position.split(",")
        for word in words:
            alone = ("learned",) if words == ["learned"] else ()
            check_choice("position", word.strip(), ("rope", "none", *alone))
        if len(self.head_sizes) != 4 or self.head_sizes[1] % self.head_sizes[0]:
            raise UserError(
                f"delta_sizes={self.delta_sizes}: must be four numbers, of which the first divides the second"
            )
        for check_more in self.checks:
            check_more(self)

    def window_of(self, layer: int) -> int | None:
        """How many keys a query of a softmax layer sees, its own included; None: all."""
        word = word_of(self.window, layer)
        return None if word == "none" else int(word)

    @property
    def head_sizes(self) -> list[int]:
        """Key heads, heads, and the widths of keys and values, in layers with the delta rule and in
        gla."""
        return self.delta_sizes or [self.n_head, self.n_head, self.head_dim, self.head_dim]

    def layers(self) -> list[tuple[str, LayerGate]]:
        """[(mixer name, LayerGate)], one per layer: `attention` and `gate` repeat up to n_layer.

        Raises UserError for a gate that cannot be read.
        """
        names = [name.strip() for name in self.attention.split(",")]
        gates = [parse_gate(gate) for gate in self.gate.split(",")]
        return [(names[i % len(names)], gates[i % len(gates)]) for i in range(self.n_layer)]


@dataclass
class TrainConfig(GPTConfig):
    """Every key of a run: those of the model, and these."""

    dataset: str = key(
        "data/pystdlib", "folder of the data, or a mixture data/a:7,data/b:3", find=find_data
    )
    mask_documents: bool = key(
        False, "text: rows are filled with whole documents, and nothing is read across these"
    )
    out_dir: str = key("out", "folder that the run is written to")
    init_from: str = key(
        "scratch",
        "scratch; resume: go on with out_dir's ckpt.pt; auto: resume if it is there, else scratch; or a checkpoint",
        find=find_start,
    )
    overwrite: bool = key(
        False, "true: replace the run in out_dir, or write among files that are not of a run"
    )
    dry_run: bool = key(
        False, "true: print memory, time and disk that the run takes, and do nothing else"
    )
    seed: int = key(1337, "seed of the weights, the order of the data and the dropout", at_least=0)

    parallel: str = key(
        "ddp",
        "what each process holds; ddp: all of the model, fsdp: a shard",
        choices=("ddp", "fsdp"),
    )
    activation_checkpointing: bool = key(
        False, "compute each block again on the way back: less memory, more time"
    )

    batch_size: int = key(12, "rows per micro-step of a process", at_least=1)
    gradient_accumulation_steps: int = key(
        1, "micro-steps per step, over all processes together", at_least=1
    )
    max_iters: int = key(5000, "number of steps (updates of the weights)", at_least=1)
    optimizer: str = key(
        "adamw",
        "muon: Muon for the blocks' matrices, AdamW for the rest",
        choices=("adamw", "muon"),
    )
    learning_rate: float = key(6e-4, "peak of the learning rate", above=0)
    muon_lr_scale: float = key(1.0, "Muon's learning rate, as a multiple of AdamW's", above=0)
    muon_split: str = key(
        "projection",
        "what Muon steps by itself; projection: q, k, v, each whole; head: each head of these",
        choices=("projection", "head"),
    )
    gate_lr_scale: float = key(
        1.0, "learning rate of the gates' parameters, as a multiple of the others'", above=0
    )
    gate_weight_decay: float | None = key(
        None, "weight decay of the gates' matrices (None: weight_decay)", at_least=0
    )
    gate_optimizer: str | None = key(
        None,
        "optimizer=muon: what steps the gates' matrices (None: muon)",
        choices=("adamw", "muon"),
    )
    gates_only: bool = key(
        False, "true: the gates alone are trained, such as new ones on a checkpoint (init_from)"
    )
    schedule: str = key(
        "cosine",
        "learning rate after the warmup; cosine: falls to min_lr; wsd: constant, then falls over the last decay_iters",
        choices=("cosine", "wsd", "constant"),
    )
    warmup_iters: int = key(100, "steps of linear warmup", at_least=0)
    decay_iters: int | None = key(
        None, "wsd: steps of the decay (None: a fifth of the run)", at_least=1
    )
    min_lr: float | None = key(
        None, "learning rate at the decay's end (None: learning_rate / 10; wsd: 0)", at_least=0
    )
    keep_moments: bool = key(
        False, "init_from=CHECKPOINT: keep its optimizer's moments; other batches need another seed"
    )
    weight_decay: float = key(0.1, "weight decay of matrices; vectors have none", at_least=0)
    beta1: float = key(0.9, "AdamW's decay of the mean gradient", at_least=0, below=1)
    beta2: float = key(0.95, "AdamW's decay of the mean squared gradient", at_least=0, below=1)
    grad_clip: float | None = key(
        1.0, "norm that a larger gradient is scaled down to (0 or None: none)", at_least=0
    )

    eval_interval: int = key(500, "steps between evaluations", at_least=1)
    save_interval: int | None = key(
        None,
        "steps between checkpoints (None: eval_interval); a multiple of eval_interval, or a divisor",
        at_least=1,
    )
    keep_interval: int | None = key(
        None,
        "steps between checkpoints that stay, as ckpt-1500.pt; a multiple of save_interval",
        at_least=1,
    )
    keep_last: int | None = key(
        None, "how many of those of keep_interval stay, the last ones (None: all)", at_least=1
    )
    # by this default every data set of rows of the experiments is read whole; evaluating the sample
    # of a text takes a tenth of an experiment's time
    eval_tokens: int | None = key(
        100_000,
        "size of the fixed sample that evaluations read (None: all); less in a run of fewer steps than eval_interval",
        at_least=1,
    )
    eval_whole: bool | None = key(
        None, "end with the whole validation split (None: if that is quicker than training)"
    )
    stop_above: float | None = key(
        None, "end the run after two evaluations in a row above this accuracy", at_least=0
    )
    log_interval: int = key(10, "steps between lines of metrics.jsonl", at_least=1)
    logger: str = key(
        "jsonl",
        "where rows go, too (docs/scale.md, Watching)",
        choices=("jsonl", "tensorboard", "wandb", "trackio"),
    )
    meters: bool = key(
        True, "measure gates, sinks and activations at every evaluation (docs/meters.md)"
    )

    device: str = key("auto", "device to compute on", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = key(
        "auto",
        "dtype of matrix products; weights stay float32. auto on a CPU: what a short test finds faster; name "
        "one to repeat a run; float16 is for GPUs, and refused on a CPU",
        choices=("auto", *DTYPES),
    )
    compile: str = key(
        "auto",
        "torch.compile; auto: for 500 steps or more on a GPU",
        choices=("auto", "true", "false"),
    )
    threads: int = key(
        0,
        "CPU threads per process (0: OMP_NUM_THREADS, or cores / processes)",
        at_least=0,
        at_most=512,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.gates_only and not any(gate.native or gate.positions for _, gate in self.layers()):
            raise UserError("gates_only=True: no layer has a gate; name one, as in --gate=headwise")
        if self.compile == "true" and self.mask_documents:
            raise UserError(
                "compile='true': with mask_documents each batch has other lengths, which torch.compile would "
                "compile anew; leave compile out"
            )
        if self.gate_optimizer == "muon" and self.optimizer != "muon":
            raise UserError(
                "gate_optimizer='muon': is for optimizer='muon'; leave it out, or add --optimizer=muon"
            )
        if self.schedule != "wsd" and self.decay_iters is not None:
            raise UserError(
                f"decay_iters={self.decay_iters}: is of schedule='wsd', not of {self.schedule!r}"
            )
        if self.save_every % self.eval_interval and self.eval_interval % self.save_every:
            raise UserError(
                f"save_interval={self.save_interval}: must be a multiple of "
                f"eval_interval={self.eval_interval}, or divide it"
            )
        if self.keep_interval is not None and self.keep_interval % self.save_every != 0:
            name = "eval_interval" if self.save_interval is None else "save_interval"
            raise UserError(
                f"keep_interval={self.keep_interval}: a checkpoint is saved every {name}={self.save_every} "
                "steps; give a multiple of that"
            )
        if self.keep_last is not None and self.keep_interval is None:
            raise UserError(
                f"keep_last={self.keep_last}: is of the checkpoints of keep_interval; give that, too"
            )

    @property
    def save_every(self) -> int:
        """Steps between checkpoints."""
        return self.save_interval or self.eval_interval


def model_args(config: TrainConfig) -> dict:
    """The keys of the model among those of a run."""
    return {field.name: getattr(config, field.name) for field in fields(GPTConfig)}


@dataclass
class ReadingKeys:
    """How evaluate.py and meters.py read data with a checkpoint."""

    dataset: str | None = key(
        None, "folder of the data (None: what the checkpoint was trained on)", find=find_data
    )
    split: str = key("val", "the split of the data to read")
    dtype: str | None = key(None, "dtype of matrix products (None: the run's)", choices=DTYPES)
    out: str | None = key(
        None,
        "file for the numbers as JSON (None: evaluate.py writes none, meters.py meters.json beside the "
        "last checkpoint)",
    )
    device: str = key("auto", "device to compute on", choices=("auto", "cpu", "cuda", "mps"))
    threads: int = key(
        0,
        "CPU threads per process (0: OMP_NUM_THREADS, or cores / processes)",
        at_least=0,
        at_most=512,
    )
