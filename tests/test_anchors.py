"""Runs of train.py against the same training with published code, from identical weights, on identical batches.

On our side a run is all of train.main: its batches, schedule, loss, clipping and AdamW. The other side is a loop in
plain PyTorch, as nanoGPT trains, around a model of transformers or of fla. All is float64, so that what is left of a
difference is rounding: about 1e-14, where another constant (an eps, a beta, the form of GELU) makes over 1e-6.
"""

import copy
import math

import published
import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import train
from data.shards import open_dataset
from runs.checkpoint import load_model

KEYS = dict(
    n_layer=2, n_head=2, block_size=24, batch_size=2, learning_rate=3e-3, min_lr=3e-4, warmup_iters=5,
    weight_decay=0.1, beta1=0.9, beta2=0.99, grad_clip=0.5, log_interval=1, seed=7, meters=False,
)  # fmt: skip
TOLERANCE = 1e-9  # of losses, norms of gradients and logits, which are all of order one


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


SIZES = dict(vocab_size=256, hidden_size=32, num_hidden_layers=2)
EAGER = dict(attn_implementation="eager")
GPT2 = dict(vocab_size=256, n_positions=100, n_embd=32, n_layer=2, n_head=2, n_inner=64)
GPT2 |= EAGER | dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
NEXT = dict(intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16, mlp_only_layers=[0, 1])
NEXT |= dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
NEXT |= SIZES | EAGER | dict(max_position_embeddings=100)
FLA = SIZES | dict(num_heads=2, max_position_embeddings=100, intermediate_size=64, norm_eps=1e-5)
THEIRS = {
    "GPT-2": hf.GPT2Config(**GPT2),
    "GPT-2, exact gelu": hf.GPT2Config(**GPT2, activation_function="gelu"),
    "headwise": NEXT, "elementwise": NEXT,
    "Mamba-2": hf.Mamba2Config(**SIZES, num_heads=4, head_dim=16, state_size=24, n_groups=1, chunk_size=32),
    "GLA": FLA | dict(model_type="gla", expand_k=0.5, expand_v=1.0, use_output_gate=True),
    "DeltaNet": FLA | dict(model_type="delta_net", expand_k=1.0, expand_v=1.0, allow_neg_eigval=True),
}  # fmt: skip
RUNS = [(name, 20) for name in THEIRS]
# two of fla are left out: their gradients are large at this learning rate, and 200 steps multiply the rounding
RUNS += [pytest.param(name, 200, marks=pytest.mark.slow) for name in THEIRS if name not in ("GLA", "DeltaNet")]
IDX = torch.arange(300).view(3, 100) * 37 % 256  # every id


def theirs_of(name, folder):
    """The model, and its folder: biases that are not 0, norms that are not 1."""
    config = THEIRS[name]
    if name in ("headwise", "elementwise"):
        return published.save_gated_qwen3(name, folder, **config)
    if isinstance(config, dict):
        return published.save_fla(config, folder)
    return published.save(hf.AutoModelForCausalLM.from_config(copy.deepcopy(config)), folder)


def plain_run(model, data, max_iters, micro_steps):
    """Training written out, as nanoGPT trains: [(learning rate, loss, norm of the gradient)] of its steps."""
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
            x, y, _ = dataset.batch(
                "train", step, seed=keys["seed"], batch_size=keys["batch_size"], block_size=keys["block_size"],
                micro_step=m, gradient_accumulation_steps=micro_steps,
            )  # fmt: skip
            loss = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()) / micro_steps
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), keys["grad_clip"], foreach=False)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        curve.append((lr, total, norm.item()))
    return curve


@torch.no_grad()
def assert_same_logits(ours, theirs):
    with published.InFloat64():
        expected = theirs(IDX).logits
    assert (ours(IDX) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(("name", "max_iters"), RUNS)
def test_a_model_of_transformers_and_of_fla_is_trained_as_ours(
    name, max_iters, text, run, tmp_path, monkeypatch, helpers
):
    with published.InFloat64():
        theirs = theirs_of(name, tmp_path)
        ours, _ = load_model(tmp_path)
    assert_same_logits(ours, theirs)
    monkeypatch.setattr(train, "make_model", lambda *args: (ours, []))
    keys = dict(max_iters=max_iters, eval_interval=max_iters, gradient_accumulation_steps=2)
    rows = helpers.metrics(run("run", dataset=text, **keys), "train")
    curve = torch.tensor([[row[key] for key in ("lr", "loss", "grad_norm")] for row in rows])
    _, losses, norms = curve.unbind(1)
    # the loss falls and some gradients are clipped: else the comparison would say little
    assert losses[-5:].mean() < losses[0] - 0.3 and norms.max() > KEYS["grad_clip"]
    with published.InFloat64():
        expected = plain_run(theirs, text, max_iters, micro_steps=2)
    torch.testing.assert_close(curve, torch.tensor(expected), rtol=0, atol=TOLERANCE)
    assert_same_logits(ours, theirs)
