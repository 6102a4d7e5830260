"""Runs of train.py against the same training with published code, from identical weights, on identical batches.

On our side a run is all of train.main: its batches, schedule, loss, clipping and AdamW. The other side is a loop in
plain PyTorch, as nanoGPT trains, around a model or a layer of transformers. All is float64, so that what is left of a
difference is rounding: about 1e-14, where another constant (an eps, a beta, the form of GELU) makes over 1e-6.
"""

import copy
import math

import published
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import train
from data.shards import open_dataset
from hub.huggingface import translated
from model import GPT, GPTConfig

KEYS = dict(
    n_layer=2, n_head=2, block_size=24, batch_size=2, learning_rate=3e-3, min_lr=3e-4, warmup_iters=5,
    weight_decay=0.1, beta1=0.9, beta2=0.99, grad_clip=0.5, log_interval=1, seed=7, meters=False,
    memory_check=False,
)  # fmt: skip
STEPS = [20, pytest.param(200, marks=pytest.mark.slow)]
TOLERANCE = 1e-9  # of losses, norms of gradients and final weights, which are all of order one


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_ours(**keys):
    shared = {name: value for name, value in KEYS.items() if name in GPTConfig.__dataclass_fields__}
    return GPT(GPTConfig(mlp_ratio=2, vocab_size=256, **shared, **keys))


@torch.no_grad()
def gpt2_and_ours(gelu, mlp):
    """Both with the same weights: biases that are not 0, norms that are not 1."""
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=KEYS["block_size"], n_embd=32, n_layer=2, n_head=2, n_inner=64,
            activation_function=gelu, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager",
        )
    )  # fmt: skip
    for p in theirs.parameters():
        p += 0.1 * torch.randn_like(p)
    ours = make_ours(n_embd=32, norm="layer", bias=True, mlp=mlp, position="learned")
    ours.load_state_dict(translated(ours.config, "gpt2", theirs.state_dict()))
    return theirs, ours


def our_run(model, data, out_dir, monkeypatch, helpers, **keys):
    """train.main with this model. Returns [(learning rate, loss, norm of the gradient)] of its steps."""
    monkeypatch.setattr(train, "make_model", lambda *args: (model, [], []))
    keys = KEYS | dict(eval_interval=keys["max_iters"]) | keys
    rows = helpers.metrics(helpers.train(data, out_dir, **keys), "train")
    return [(row["lr"], row["loss"], row["grad_norm"]) for row in rows]


def plain_run(model, logits_of, data, max_iters, micro_steps=1):
    """The same training written out, as nanoGPT trains. Returns what our_run does."""
    keys, dataset, curve = KEYS, open_dataset(data), []
    # a vector may come with axes of length 1, and then still has no weight decay
    decayed = [p for p in model.parameters() if p.squeeze().dim() >= 2]
    others = [p for p in model.parameters() if p.squeeze().dim() < 2]
    groups = [dict(params=decayed, weight_decay=keys["weight_decay"]), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, betas=(keys["beta1"], keys["beta2"]), foreach=False, fused=False)
    peak, lowest, warmup = keys["learning_rate"], keys["min_lr"], keys["warmup_iters"]
    for step in range(max_iters):
        share = (step - warmup) / (max_iters - warmup)
        lr = lowest + (peak - lowest) * (1 + math.cos(math.pi * share)) / 2
        lr = peak * (step + 1) / (warmup + 1) if step < warmup else lr
        total = 0.0
        for m in range(micro_steps):
            x, y = dataset.batch(
                "train", step, seed=keys["seed"], batch_size=keys["batch_size"], block_size=keys["block_size"],
                micro_step=m, gradient_accumulation_steps=micro_steps,
            )  # fmt: skip
            loss = F.cross_entropy(logits_of(model, x).flatten(0, 1), y.flatten()) / micro_steps
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), keys["grad_clip"], foreach=False)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        curve.append((lr, total, norm.item()))
    return curve


def assert_same_curves(ours, theirs):
    """Of which the loss falls, and some gradients are clipped: else the comparison would say little."""
    losses, norms = [loss for _, loss, _ in ours], [norm for _, _, norm in ours]
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3 and max(norms) > KEYS["grad_clip"]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("max_iters", STEPS)
@pytest.mark.parametrize("gelu, mlp", [("gelu", "gelu"), ("gelu_new", "gelu_tanh")])
def test_with_gpt2s_norms_biases_and_weights_a_run_is_gpt2s(gelu, mlp, max_iters, text, tmp_path, monkeypatch, helpers):
    theirs, ours = gpt2_and_ours(gelu, mlp)
    keys = dict(max_iters=max_iters, gradient_accumulation_steps=2)
    curve = our_run(ours, text, tmp_path, monkeypatch, helpers, **keys)
    with published.InFloat64():
        expected = plain_run(theirs, lambda model, x: model(x).logits, text, max_iters, micro_steps=2)
    assert_same_curves(curve, expected)
    for name, their in translated(ours.config, "gpt2", theirs.state_dict()).items():
        assert (ours.get_parameter(name) - their).abs().max() < TOLERANCE, name


class Published(nn.Module):
    """A layer of transformers in the place of a mixer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, state=None, start=0, only=None):
        return self.layer(x)


LAYERS = {
    "softmax": (published.qwen3_next_attention, dict(gate="elementwise", qk_norm=True, n_kv_head=1)),
    "mamba2": (published.mamba2_mixer, dict(gate="native", state_size=8)),
    "gated_deltanet": (published.qwen3_next_gated_deltanet, dict(gate="native")),
    "kda": (published.kimi_linear_attention, dict(gate="native")),
}
RUNS = [(name, 20) for name in ("softmax", "mamba2", "gated_deltanet")]
RUNS += [pytest.param(name, 200, marks=pytest.mark.slow) for name, _ in RUNS]
RUNS += [pytest.param("kda", 20, marks=pytest.mark.slow)]  # a step of the published code takes 0.2 s


@pytest.mark.parametrize("name, max_iters", RUNS)
def test_a_run_with_our_mixer_is_one_with_the_published_layer(name, max_iters, text, tmp_path, monkeypatch, helpers):
    publish, keys = LAYERS[name]
    torch.manual_seed(0)
    ours = make_ours(attention=name, n_embd=32, init="pytorch", **keys)
    ours.wte.weight.data *= 0.1  # the loss starts near log 256
    theirs = copy.deepcopy(ours)
    with published.InFloat64():
        for block in theirs.blocks:
            block.mixer = Published(publish(block.mixer))
        expected = plain_run(theirs, lambda model, x: model(x), text, max_iters)
    curve = our_run(ours, text, tmp_path, monkeypatch, helpers, max_iters=max_iters)
    assert_same_curves(curve, expected)
    with published.InFloat64():
        for block in ours.blocks:
            block.mixer = Published(publish(block.mixer))
    for (path, our), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (our - their).abs().max() < TOLERANCE, path
