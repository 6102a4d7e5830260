"""Layers as transformers and fla publish them, and folders of models that have them.

test_oracles.py compares outputs of layers with ours, and test_anchors.py runs in which such models are trained.
"""

import json
from pathlib import Path

import safetensors.torch
import tokenizers
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_recurrence import definition
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import KimiLinearConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridConfig, OlmoHybridGatedDeltaNet
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from data.tokenizer import BYTE_OF


class InFloat64(TorchFunctionMode):
    """A context in which every cast to float32 goes to float64: published layers cast where half precision needs it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return function(*args, **kwargs)


PLACES = {  # modules of theirs: where ours have the same
    "conv1d": "conv", "o_norm": "norm", "o_proj": "out_proj", "f_a_proj": "decay_in", "f_b_proj": "decay_out",
    "g_proj": "gates.native.proj", "g_a_proj": "gates.native.down", "g_b_proj": "gates.native.proj",
}  # fmt: skip


def filled(theirs: nn.Module, ours: nn.Module, **given: torch.Tensor) -> nn.Module:
    """theirs with the weights that are given by module, and with those of ours for all other parameters."""
    for path, p in theirs.named_parameters():
        module, _, kind = path.removeprefix("forget_gate.").partition(".")
        weight = given.get(module)
        if weight is None:
            weight = ours.get_parameter(f"{PLACES.get(module, module)}.{kind}".rstrip("."))
        p.copy_((weight.T if path == "conv1d.weight" else weight).reshape(p.shape))
    return theirs.eval()


@torch.no_grad()
def olmo_hybrid_gated_deltanet(ours) -> nn.Module:
    """For gated_deltanet with its native gate, with either beta_max."""
    Hk, H, Dk, Dv = ours.config.head_sizes
    config = OlmoHybridConfig(
        hidden_size=ours.config.n_embd, linear_num_key_heads=Hk, linear_num_value_heads=H, linear_key_head_dim=Dk,
        linear_value_head_dim=Dv, num_hidden_layers=2, linear_allow_neg_eigval=ours.config.beta_max == 2,
    )  # fmt: skip
    q, k, v, beta, dt = ours.in_proj.weight.split([Hk * Dk, Hk * Dk, H * Dv, H, H])
    rows = dict(q_proj=q, k_proj=k, v_proj=v, b_proj=beta, a_proj=dt)
    return filled(OlmoHybridGatedDeltaNet(config, layer_idx=0), ours, **rows)


@torch.no_grad()
def kimi_linear_attention(ours) -> nn.Module:
    """For kda with its native gate."""
    C, H, D = ours.config.n_embd, ours.n_head, ours.value_width
    config = KimiLinearConfig(
        hidden_size=C, linear_num_heads=H, linear_head_dim=D, linear_conv_kernel_dim=4, rms_norm_eps=1e-5,
        num_hidden_layers=1, layer_types=["linear_attention"], hidden_act="silu",
    )  # fmt: skip
    q, k, v, beta = ours.in_proj.weight.split([H * D, H * D, H * D, H])
    return filled(KimiLinearDeltaAttention(config, layer_idx=0), ours, q_proj=q, k_proj=k, v_proj=v, b_proj=beta)


class GatedQwen3Attention(Qwen3Attention):
    """Qiu et al.'s gate on the readout, as their checkpoints hold it.

    q_proj gives, for each key/value head, the queries of its H / Hk heads and then their gates: one number a head
    (headwise) or one a channel (elementwise).
    """

    def __init__(self, config, layer_idx: int, kind: str):
        super().__init__(config, layer_idx)
        H, D = config.num_attention_heads, config.head_dim
        rows = H * D + {"headwise": H, "elementwise": H * D}[kind]
        self.q_proj = nn.Linear(config.hidden_size, rows, bias=False)
        self.q_proj.register_forward_hook(self.keep_the_gate)
        self.o_proj.register_forward_pre_hook(lambda module, args: args[0] * self.gate)

    def keep_the_gate(self, module, args, rows):
        """The queries alone, for the attention; o_proj is given its readout times self.gate."""
        H, Hk, D = self.config.num_attention_heads, self.config.num_key_value_heads, self.head_dim
        q, gate = rows.unflatten(-1, (Hk, -1)).tensor_split([H // Hk * D], dim=-1)
        self.gate = gate.flatten(2).unflatten(-1, (H, -1)).sigmoid().expand(-1, -1, -1, D).flatten(2)
        return q.flatten(2)


class FlaMixer(nn.Module):
    """fla's layers gla.py, gated_deltanet.py, delta_net.py and kda.py, with the recurrence token by token."""

    def __init__(self, c: dict):
        super().__init__()
        c = dict(use_short_conv=c["model_type"] != "gla", conv_size=4) | c
        self.kind, C, self.H = c["model_type"], c["hidden_size"], c["num_heads"]
        self.Hv, width = c.get("num_v_heads", self.H), c.get("head_dim", C // self.H)
        self.Dk, self.Dv = int(width * c.get("expand_k", 1)), int(width * c["expand_v"])
        K, V = self.H * self.Dk, self.Hv * self.Dv
        linear = {"q": (C, K), "k": (C, K), "v": (C, V), "o": (V, C)}
        linear |= {} if self.kind == "gla" else {"b": (C, self.Hv)}
        linear |= {"a": (C, self.Hv)} if self.kind == "gated_deltanet" else {}
        linear |= {"g": (C, V)} if c.get("use_gate", c.get("use_output_gate")) else {}
        for name, (n_in, n_out) in linear.items():
            self.add_module(f"{name}_proj", nn.Linear(n_in, n_out, bias=False))
        if self.kind == "gla":
            self.gk_proj = nn.Sequential(nn.Linear(C, 16, bias=False), nn.Linear(16, K))
        if self.kind == "kda":
            up = nn.Linear(self.Dv, self.Hv * self.Dk, bias=False)
            self.f_proj = nn.Sequential(nn.Linear(C, self.Dv, bias=False), up)
            self.g_proj = nn.Sequential(nn.Linear(C, self.Dv, bias=False), nn.Linear(self.Dv, V))
        if self.kind in ("gated_deltanet", "kda"):
            self.A_log = nn.Parameter(torch.randn(self.Hv))
            self.dt_bias = nn.Parameter(torch.randn(self.Hv * (self.Dk if self.kind == "kda" else 1)))
        for name, n in {"q": K, "k": K, "v": V}.items() if c["use_short_conv"] else ():
            W = c["conv_size"]
            self.add_module(f"{name}_conv1d", nn.Conv1d(n, n, W, groups=n, padding=W - 1, bias=False))
        gated = "g_norm_swish_gate" if hasattr(self, "g_proj") else "g_norm"
        self.norm_name = gated if self.kind == "gla" else "o_norm"
        self.add_module(self.norm_name, nn.RMSNorm(self.Dv, eps=c["norm_eps"]))
        self.beta_max = 2 if c.get("allow_neg_eigval") else 1
        self.act = F.sigmoid if self.kind == "kda" or c.get("output_gate_activation") == "sigmoid" else F.silu

    def forward(self, hidden_states, **_):
        x, T, part = hidden_states, hidden_states.shape[1], self.get_submodule
        q, k, v = (part(f"{name}_proj")(x) for name in "qkv")
        if hasattr(self, "q_conv1d"):
            q, k, v = (part(f"{name}_conv1d")(y.mT)[..., :T].mT for name, y in zip("qkv", (q, k, v), strict=True))
        q, k, v = q.unflatten(-1, (self.H, -1)), k.unflatten(-1, (self.H, -1)), v.unflatten(-1, (self.Hv, -1))
        log_decay, beta = None, None
        if self.kind == "gla":
            log_decay = F.logsigmoid(self.gk_proj(x)).unflatten(-1, (self.Hv, -1)) / 16
        else:
            q, k, v = (F.silu(y) for y in (q, k, v))
            q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
            beta = self.beta_max * self.b_proj(x).sigmoid()
        if hasattr(self, "A_log"):
            dt = F.softplus((self.f_proj if self.kind == "kda" else self.a_proj)(x) + self.dt_bias)
            log_decay = -self.A_log.exp()[:, None] * dt.unflatten(-1, (self.Hv, -1))
        q, k = (y.repeat_interleave(self.Hv // self.H, dim=2) for y in (q * self.Dk**-0.5, k))
        o = part(self.norm_name)(definition(q, k, v, log_decay=log_decay, beta=beta)[0])
        o = o * self.act(self.g_proj(x).view_as(o)) if hasattr(self, "g_proj") else o
        return self.o_proj(o.flatten(2)), None


OF_LLAMA = {"embed_tokens": "embeddings", "self_attn": "attn", "input_layernorm": "attn_norm"}
OF_LLAMA |= {"post_attention_layernorm": "mlp_norm"}


def save_fla(about: dict, folder: Path) -> nn.Module:
    """The folder of a model of fla with random weights: a Llama with its mixers, under its names. Returns the model."""
    attn = about.get("attn", {"layers": [], "num_heads": 2, "num_kv_heads": 2, "rope_theta": 1e4})
    model = LlamaForCausalLM(
        LlamaConfig(
            **{name: about[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
            num_attention_heads=attn["num_heads"], num_key_value_heads=attn["num_kv_heads"],
            rope_parameters={"rope_type": "default", "rope_theta": attn["rope_theta"]}, attn_implementation="eager",
            rms_norm_eps=about["norm_eps"],
        )
    )  # fmt: skip
    for i, layer in enumerate(model.model.layers):
        layer.self_attn = layer.self_attn if i in attn["layers"] else FlaMixer(about)
    save(model, folder)
    tensors = model.state_dict()
    for theirs, here in OF_LLAMA.items():
        tensors = {name.replace(theirs, here): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(about))
    return model


@torch.no_grad()
def save(model: nn.Module, folder: Path, **how: object) -> nn.Module:
    """The folder of a model of transformers whose weights are far from their start: its norms are not 1."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder, **how)
    return model.eval()


def save_gated_qwen3(kind: str, folder: Path, max_shard_size="50GB", **keys) -> nn.Module:
    """The folder of a Qwen3 as the gated models are published: "baseline", or with a "headwise" or an "elementwise"
    gate in every layer. Returns the model."""
    model = Qwen3ForCausalLM(Qwen3Config(**keys))
    for i, layer in enumerate(model.model.layers):
        if kind != "baseline":
            layer.self_attn = GatedQwen3Attention(model.config, i, kind)
    save(model, folder, max_shard_size=max_shard_size)
    about = json.loads((folder / "config.json").read_text()) | {"use_qk_norm": True, "qkv_bias": False}
    about |= {f"{name}_attn_output_gate": name == kind for name in ("headwise", "elementwise")}
    (folder / "config.json").write_text(json.dumps(about | {"auto_map": {"AutoModel": "there_is_no_such_file.Model"}}))
    return model


def save_tokenizer(file: Path, vocab_size: int) -> None:
    """A byte-level tokenizer whose last ids are two special tokens, and those of the bytes before them."""
    fillers = {f"filler{i}": i for i in range(vocab_size - 258)}
    characters = {character: len(fillers) + byte for character, byte in BYTE_OF.items()}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=fillers | characters, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|end|>", "<|im_start|>"])
    made.save(str(file))
