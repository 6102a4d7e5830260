"""Published layers against ours with the same weights: float32, largest difference below 1e-5.

Whole models of other layers, in float64 and trained, are in test_anchors.py.
"""

import importlib
import re
from pathlib import Path

import published
import pytest
import torch
from transformers import GptOssConfig, GraniteSWAConfig, Inkling2TextConfig, MiMoV2FlashConfig, MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

import model as nanogate
from base import configurator
from hub.families import KEYS
from model import MIXERS, GPTConfig
from ops import layers

B, T, C, H, D = 2, 100, 64, 4, 16


def mixers(attention, n_layer=1, **keys):
    """Those of a model with native gates."""
    keys |= dict(attention=attention, gate="native", n_layer=n_layer, n_embd=C, n_head=H, block_size=T, vocab_size=1)
    return [block.mixer for block in randomized(nanogate.GPT(GPTConfig(**keys))).blocks]


@torch.no_grad()
def randomized(module):
    """Weights far from their start: gates that are open and shut, norms that are not 1."""
    for name, p in module.named_parameters():
        p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.5) + (1.0 if "norm" in name else 0.0))
    return module.eval()


@torch.no_grad()
def assert_same(ours, theirs, length=T, dtype=torch.float32, tolerance=1e-5):
    x = torch.randn(B, length, C, dtype=dtype)
    y, expected = ours(x), theirs(x)
    assert expected.abs().max() > 0.01 and (y - expected).abs().max() < tolerance * expected.abs().max()


OLMO = published.olmo_hybrid_gated_deltanet, "gated_deltanet"
LAYERS = [
    *((*OLMO, dict(delta_sizes=[H, H, D, 2 * D], beta_max=n)) for n in (1, 2)),
    (published.kimi_linear_attention, "kda", {}),
]


@pytest.mark.parametrize("publish, name, keys", LAYERS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_mixer_is_the_published_layer(publish, name, keys):
    (ours,) = mixers(name, **keys)
    assert_same(ours, publish(ours))


DOCS = Path(nanogate.__file__).with_name("docs").joinpath("gates.md").read_text()
GPT_OSS = dict(re.findall(r"--(\w+)=([^ `]+)", DOCS.partition("The attention of gpt-oss")[2]))
OURS = dict(n_layer=2, n_embd=C, n_head=H, n_kv_head=2, block_size=150, vocab_size=1)
SIZES = dict(hidden_size=C, num_attention_heads=H, num_hidden_layers=2, attn_implementation="eager")
SIZES |= dict(layer_types=["sliding_attention", "full_attention"], num_key_value_heads=2)
MIMO = dict(num_key_value_heads=1, head_dim=D, v_head_dim=D, attention_value_scale=None)  # sliding layers: 2
INKLING = dict(layer_types=["hybrid_sliding"] * 2, swa_num_attention_heads=H, swa_num_key_value_heads=2, swa_head_dim=D)
YARN = GptOssConfig().rope_parameters | {"truncate": True}  # here the ramp's bounds are whole pairs
WITH_SINKS = {  # attention: its config, our keys
    "GptOssAttention": (GptOssConfig(**SIZES, rope_parameters=YARN), GPT_OSS | OURS),
    "GraniteSWAAttention": (
        GraniteSWAConfig(**SIZES, sliding_window=7, attention_multiplier=D**-0.5),
        OURS | dict(attention="sink_head", window="7,none"),
    ),
    "MiMoV2FlashAttention": (  # only the sliding layers have sinks
        MiMoV2FlashConfig(**SIZES | MIMO, sliding_window=7), OURS | dict(attention="sink_head", window="7", n_layer=1)
    ),
    "Inkling2SlidingAttention": (
        Inkling2TextConfig(**SIZES | INKLING, sliding_window_size=7),
        OURS | dict(attention="sink_token", window="7", gate="elementwise", position="none"),
    ),
}  # fmt: skip
PLACES = {"sinks": "sink.logit", "sink_proj": "sink.proj", "gate_proj": "gates.readout.proj", "o_proj": "out_proj"}
ONLY_INKLING = ("k_sconv", "v_sconv", "q_l2_clip", "k_l2_clip", "rel_l2_clip", "v_norm")


def attention_with_sink(ours, name, config):
    """The class of this name as x -> y, with the weights of ours and without what ONLY_INKLING has."""
    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    theirs = getattr(module, name)(config, layer_idx=ours.layer).double().eval()
    for part in ONLY_INKLING if name.startswith("Inkling") else ():
        delattr(theirs, part)
        setattr(theirs, part, lambda x, **_: x)
    for full_name, p in theirs.named_parameters():
        part, _, kind = full_name.partition(".")
        if part in ("q_proj", "k_proj", "v_proj"):
            p.copy_(getattr(ours.qkv, kind).split([n * ours.value_width for n in (H, 2, 2)])["qkv".index(part[0])])
        elif part in PLACES:
            p.copy_(ours.get_parameter(f"{PLACES[part]}.{kind}".rstrip(".")))
        else:
            p.zero_()  # Inkling 2's position bias

    def attention(x):
        i = torch.arange(x.shape[1])
        is_hidden = (i[:, None] < i) | (i[:, None] - i >= (theirs.sliding_window or len(i)))
        mask = torch.zeros(is_hidden.shape).double().masked_fill(is_hidden, -torch.inf)[None, None]
        rope = layers.Angles(layers.rope_frequencies, D, 10000.0)(x, 0)  # (T, 1, D / 2) each
        rope = [torch.cat([y, y], -1).transpose(0, 1) for y in rope]
        with published.InFloat64():
            if name == "GptOssAttention":  # with YaRN
                rope = module.GptOssRotaryEmbedding(config)(x, i[None])
            return theirs(x, *([] if name.startswith("Inkling") else [rope]), mask)[0]

    return attention


@torch.no_grad()
@pytest.mark.parametrize("name", WITH_SINKS)
def test_softmax_with_a_sink_and_a_window_is_the_published_attention_in_float64(name):
    config, keys = WITH_SINKS[name]
    for block in randomized(nanogate.GPT(configurator.build(GPTConfig, keys)).double()).blocks:
        assert_same(block.mixer, attention_with_sink(block.mixer, name, config), 150, torch.float64, 1e-13)


def test_the_keys_of_gpt_oss_in_the_docs_are_its_config():
    ours, theirs = configurator.build(GPTConfig, GPT_OSS), GptOssConfig()
    for key in ("n_layer", "n_embd", "n_head", "n_kv_head", "head_dim", "block_size", "norm_eps", "tie_embeddings"):
        assert getattr(ours, key) == getattr(theirs, KEYS[key]), key
    windows = {"sliding_attention": theirs.sliding_window, "full_attention": None}
    assert [ours.window_of(i) for i in range(ours.n_layer)] == [windows[kind] for kind in theirs.layer_types]


def minimax_lightning_attention(ours):
    """For the README's Lightning with its native gate."""
    n_layer = ours.config.n_layer
    config = MiniMaxConfig(
        hidden_size=C, num_attention_heads=H, head_dim=D, num_hidden_layers=n_layer, block_size=32, hidden_act="silu",
        layer_types=["linear_attention"] * n_layer,
    )  # fmt: skip
    theirs = MiniMaxLightningAttention(config, layer_idx=ours.layer)
    theirs.norm.variance_epsilon = 1e-5
    # theirs holds, head by head, D rows of each of q, k, v
    rows = dict(qkv_proj=ours.qkv.weight.view(3, H, D, C).transpose(0, 1), output_gate=ours.gates["native"].proj.weight)
    theirs = published.filled(theirs, ours, **rows)
    return lambda x: theirs(x, None, None)[0]


@torch.no_grad()
def test_the_new_mixer_of_the_readme_is_minimax_lightning_attention():
    """The README's example of a new mixer, run as it stands there, as each layer of models of one and of four."""
    readme = (Path(nanogate.__file__).parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(class Lightning.*?)```", readme, re.DOTALL)
    exec(code, vars(nanogate))
    try:
        for mixer in (*mixers("lightning"), *mixers("lightning", n_layer=4)):
            assert_same(mixer, minimax_lightning_attention(mixer))
    finally:
        del MIXERS["lightning"], nanogate.Lightning
