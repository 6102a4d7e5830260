"""Which keys of the model change nothing: a key that a run names at its start has no effect on the model."""

import dataclasses

import pytest
import torch

from base import configurator
from base.configurator import UserError
from keys import TrainConfig
from model import GLA, GPT, MIXERS, GatedDeltaNet, GPTConfig, Softmax
from ops.layers import Angles, rope_frequencies, rotate
from runs.notes import OURS, notes_on_keys, unused_keys


class Rotated(GLA):
    def project(self, x, state, start):
        p = super().project(x, state, start)
        angles = Angles(rope_frequencies, self.key_width, self.config.rope_base)
        return p.replace(q=rotate(p.q, start, angles), k=rotate(p.k, start, angles))


OWN = {"window": type("Window", (Softmax,), {}), "rotated": Rotated, "delta": type("Delta", (GatedDeltaNet,), {})}
# another value of each key. ELSEWHERE: those whose effect is on the data, the ids or the choice of a kernel
OTHER = dict(
    n_layer=4, n_head=4, head_dim=4, n_kv_head=1, n_embd=32, mlp_ratio=2.0,
    mlp=["swiglu", "gelu_tanh", "none"], norm="layer", bias=True, tie_embeddings=False, norm_eps=0.1,
    delta_sizes=[1, 4, 4, 4], beta_max=2.0, dropout=0.5,
    init="pytorch", attention="cosformer", position="none", rope_base=100.0, rope_scaling="ntk", rope_factor=3.0,
    rope_length=64, rope_restarts=False,
    qk_norm=True, short_conv=3, expand=3, state_size=4, ngram_rows=3,
    gate="headwise", gate_activation="tanh", gate_rank=2, gate_width=5, gate_input="static", gate_bias=0.5,
    readout_norm=["rms", "none"], norm_first=False, match_params=True,
    window="3", branch_scale=0.5, out_init_scale=0.5, levels=["log_linear", "merged"],
)  # fmt: skip
ELSEWHERE = {"block_size", "vocab_size", "kernels"}
SITUATIONS = [
    # sinks refuse norms, and a head of 8 channels would turn one pair alone, by the position
    *(dict(attention=name, gate="native") for name in MIXERS if name != "qwen3_next" and not name.startswith("sink_")),
    *(dict(attention=name) for name in ("softmax", "gla", "mamba2")),
    *(dict(attention=name, gate="elementwise") for name in ("softmax", "gated_deltanet")),
    *(dict(gate="elementwise@value", position=position) for position in ("none", "learned")),
    *(dict(attention="gla", position=position) for position in ("none", "learned")),
    dict(attention="gla", gate="headwise@value", gate_input="static", readout_norm="none", match_params=True),
    dict(norm="layer", bias=True, mlp="gelu_tanh", position="learned"),
    dict(norm="layer", attention="gla", gate="native", delta_sizes=[2, 2, 4, 8]),
    dict(attention="mamba2,kda", gate="native", mlp="none", n_layer=2, delta_sizes=[2, 2, 8, 4]),
    dict(attention="gla,softpick", n_layer=2),
    dict(position="none", attention="fox"),
    dict(rope_scaling="yarn", rope_factor=1.0),
    dict(rope_scaling="llama3", rope_factor=2.0, rope_length=20, qk_norm=True, position="rope,none", n_layer=2),
    dict(rope_scaling="linear", rope_factor=2.0, position="none,rope", n_layer=2),
    dict(rope_scaling="yarn", rope_factor=2.0, window="2"),
    dict(mlp="swiglu", gate="elementwise", tie_embeddings=False, attention="qwen3_next", head_dim=16),
    dict(attention="gated_deltanet", delta_sizes=[3, 6, 4, 8]),
    dict(attention="cosformer,gla", gate="native,none", n_layer=2),
    dict(gate="native,elementwise", n_layer=2),
    dict(attention="gla,softmax,mamba2", gate="native+elementwise", n_layer=3),
    *(dict(attention="rotated", position=position) for position in ("rope", "none", "learned")),
    dict(attention="window,gla", n_layer=2, rope_scaling="yarn", rope_factor=2.0),
    dict(attention="delta", delta_sizes=[3, 6, 4, 8]),
]


@torch.no_grad()
def numbers_of(keys):
    """Every weight at the start, and the logits in training with other weights; None where the keys don't fit."""
    small = dict(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=11, state_size=8, mlp_ratio=4)
    torch.manual_seed(0)
    try:
        model = GPT(GPTConfig(**small | keys)).double()
    except UserError:
        return None
    start = {name: p.clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)), dtype=p.dtype) / 3)
    torch.manual_seed(0)
    return start | {"logits": model.train()(torch.arange(10)[None, :8])}


def is_same(one, other):
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and torch.allclose(one[name], other[name], atol=1e-9) for name in one
    )


def test_a_key_of_training_that_does_nothing_is_named_and_so_is_a_warmup_longer_than_the_run():
    words = "--schedule=constant --min_lr=0 --muon_lr_scale=2 --muon_split=head --vocab_size=9"

    def notes(words):
        user_keys = configurator.read_words(TrainConfig, words.split())
        return notes_on_keys(TrainConfig(**user_keys), user_keys, False)

    named = [note.split("=")[0] for note in notes(words)]
    assert named == [f"note: {key}" for key in ("min_lr", "muon_lr_scale", "muon_split")]
    used = "--min_lr=0 --optimizer=muon --muon_lr_scale=2 --muon_split=head --init_from=x"
    used += " --keep_moments=true --vocab_size=9"
    assert not notes(used)
    words = "warmup_iters=9 is longer than the run of 3 steps, which does not reach learning_rate=0.001"
    assert notes("--learning_rate=1e-3 --warmup_iters=9 --max_iters=3") == [f"note: {words}"]
    assert not notes("--warmup_iters=3 --max_iters=3")
    (note,) = notes("--attention=kda_fla --window=128")  # a subclass of the delta rule, not of softmax
    assert note == "note: window=128 changes nothing: no layer is softmax"


def test_the_table_names_keys_and_mixers_that_there_are():
    named = unused_keys(GPTConfig(attention="monarch", block_size=8, mlp="none")).keys()
    assert named <= {field.name for field in dataclasses.fields(GPTConfig)} and len(named) == 21
    assert OURS == MIXERS.keys()


@pytest.mark.parametrize("keys", SITUATIONS, ids=str)
def test_a_change_of_a_key_called_unused_changes_nothing_and_of_a_mixer_of_your_own_no_key_is(keys, monkeypatch):
    for name, mixer in OWN.items():
        monkeypatch.setitem(MIXERS, name, mixer)
    assert {field.name for field in dataclasses.fields(GPTConfig)} == OTHER.keys() | ELSEWHERE
    unused, base = unused_keys(GPTConfig(**dict(n_layer=1, block_size=8) | keys)), numbers_of(keys)
    for key in unused:
        values = OTHER[key] if isinstance(OTHER[key], list) and key != "delta_sizes" else [OTHER[key]]
        others = [numbers_of(keys | {key: value}) for value in values if value != keys.get(key)]
        # a change that is refused is overlooked by nobody
        assert all(is_same(base, other) for other in others if other is not None), (key, unused[key])
