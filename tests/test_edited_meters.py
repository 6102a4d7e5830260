"""Meters of edited models are of what the pass computed, wherever an edit put a gate or took a value from."""

import math

import pytest
import torch
from small_models import off_its_start

import gate
import model as models
from evaluate import prune_gates
from model import MIXERS, MLP, MLPS, GPTConfig, Softmax
from runs import probe

B, T, C, H, D = 3, 12, 16, 2, 8
TOKENS = torch.randint(20, (B, T), generator=torch.Generator().manual_seed(1))
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def make_model(**keys):
    keys = dict(n_layer=2, n_embd=C, n_head=H, block_size=T, vocab_size=20, position="none") | keys
    return off_its_start(GPTConfig(**keys), torch.float64, noise=0.3)


def close(values):
    """To the four digits that meters have."""
    return pytest.approx(values.tolist(), rel=1e-3, abs=1e-6)


def weights_and_values(mixer, x):
    """Softmax attention as its formula reads: (B, H, T, T), (B, T, H, D)."""
    q, k, v = ((x @ weight.T).unflatten(-1, (H, D)) for weight in mixer.qkv.weight.split(C))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D)
    return scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1), v


def check_sink(found, weights, v, factor, mixer, stream):
    """factor (B, T, H, D): what the readout of a query is multiplied by."""
    out = mixer.out_proj.weight.unflatten(1, (H, D))  # (C, H, D)
    parts = (weights[..., None] * v.transpose(1, 2)[:, :, None])[:, :, 1:]  # (B, H, queries, T, D)
    gated = factor.transpose(1, 2)[:, :, 1:, None] * parts
    assert found["share"] == close(weights[:, :, 1:, 0].mean((0, 2)))
    written = torch.einsum("bhid,chd->bhic", gated[..., 0, :], out).norm(dim=-1)  # (B, H, queries)
    assert found["effective"] == close((written / stream.norm(dim=-1)[:, None, 1:]).mean((0, 2)))
    norms = v.norm(dim=-1)  # (B, T, H)
    assert found["value_norm"] == close((norms[:, 0] / norms[:, 1:].median(1).values).mean(0))


# -- a gate at another place -------------------------------------------------------------------------------------------


class GatedMLP(MLP):
    """With a gate on its output, which lives in the MLP."""

    def __init__(self, config, hidden):
        super().__init__(config, hidden)
        self.gate = gate.Gate(config, "elementwise", 1, config.n_embd)

    def forward(self, x):
        return self.gate(super().forward(x)[:, :, None], x).squeeze(2)


def block_with_a_gate_behind_the_mlp(block, x, state=None, start=0):
    x = x + block.mixer(block.norm_1(x), state, start)
    inner = block.norm_2(x)
    return x + block.mixer.gated("mlp", block.mlp(inner)[:, :, None], inner).squeeze(2)


@torch.no_grad()
@pytest.mark.parametrize("name, keys", [("mlp", dict(gate="elementwise@mlp")), ("mlp.gate", dict(mlp="gated"))])
def test_a_gate_in_the_mlp_is_measured_and_pruned_by_what_the_mlp_is_fed(name, keys, monkeypatch):
    monkeypatch.setitem(gate.POSITIONS, "mlp", lambda mixer: (1, mixer.config.n_embd))
    monkeypatch.setitem(MLPS, "gated", GatedMLP)
    if name == "mlp":
        monkeypatch.setattr(models.Block, "forward", block_with_a_gate_behind_the_mlp)
    model = make_model(**keys)
    masks = probe.query_masks(TOKENS, {"low": list(range(10))})
    (layers, _), x, values = probe.layer_meters(model, TOKENS, masks, "float32"), model.wte(TOKENS), []
    for block, layer in zip(model.blocks, layers, strict=True):
        inner = block.norm_2(x + block.mixer(block.norm_1(x)))
        its_gate = block.mlp.gate if name == "mlp.gate" else block.mixer.gates["mlp"]
        values.append((inner @ its_gate.proj.weight.T).sigmoid())  # (B, T, C)
        assert layer["gates"][name]["mean"] == close(values[-1].mean()[None])
        for kind, mask in masks.items():
            assert layer["sink"]["kinds"][kind]["gates"][name]["mean"] == close(values[-1][mask].mean()[None])
        x = block(x)
    prune_gates(model, 0.5)
    # what is pruned in the first layer changes what the second one is fed
    after, _ = probe.layer_meters(model, TOKENS, masks, "float32")
    assert after[0]["gates"] == layers[0]["gates"] and after[1]["gates"] != layers[1]["gates"]


# -- a gate of another input -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_gate_that_is_fed_the_readout_is_measured_as_it_was(monkeypatch):
    forward = gate.Gate.forward
    monkeypatch.setattr(gate.Gate, "forward", lambda self, y, x: forward(self, y, y.flatten(2)))
    model = make_model(gate="elementwise")
    (layers, _), x = probe.layer_meters(model, TOKENS, {}, "float32"), model.wte(TOKENS)
    for block, layer in zip(model.blocks, layers, strict=True):
        weights, v = weights_and_values(block.mixer, block.norm_1(x))
        o = torch.einsum("bhij,bjhd->bihd", weights, v)
        value = (o.flatten(2) @ block.mixer.gates["readout"].proj.weight.T).sigmoid().view_as(o)
        assert layer["gates"]["readout"]["mean"] == close(value.mean((0, 1, 3)))
        check_sink(layer["sink"], weights, v, value, block.mixer, x)
        x = block(x)


# -- layers that share something ---------------------------------------------------------------------------------------


class ValueResidual(Softmax):
    """Every layer behind the first adds the first one's values to its own; the last one lets go of them."""

    first: dict = {}

    def project(self, x, state, start):
        p = super().project(x, state, start)
        if self.layer == 0:
            self.first["v"] = p.v
            return p
        is_last = self.layer == self.config.n_layer - 1
        return p._replace(v=p.v + (self.first.pop("v") if is_last else self.first["v"]))


class KeysOfTheLayerBefore(Softmax):
    """Every layer behind the first also attends with the keys of the one before it."""

    before: dict = {}

    def project(self, x, state, start):
        p = super().project(x, state, start)
        p = p if self.layer == 0 else p._replace(k=p.k + self.before["k"])
        self.before["k"] = p.k
        return p


@torch.no_grad()
def test_layers_that_share_values_are_measured_with_those_that_they_read(monkeypatch):
    monkeypatch.setitem(MIXERS, "shared", ValueResidual)
    model = make_model(attention="shared", gate="headwise", n_layer=3)
    (layers, _), x, first = probe.layer_meters(model, TOKENS, {}, "float32"), model.wte(TOKENS), None
    for block, layer in zip(model.blocks, layers, strict=True):
        inner = block.norm_1(x)
        weights, v = weights_and_values(block.mixer, inner)
        first, v = (v, v) if first is None else (first, v + first)
        o = torch.einsum("bhij,bjhd->bihd", weights, v)
        value = (inner @ block.mixer.gates["readout"].proj.weight.T).sigmoid()  # (B, T, H)
        check_sink(layer["sink"], weights, v, value[..., None].expand_as(o), block.mixer, x)
        x = x + (value[..., None] * o).flatten(2) @ block.mixer.out_proj.weight.T
        x = x + block.mlp(block.norm_2(x))


@torch.no_grad()
def test_layers_that_share_keys_have_the_sink_and_the_induction_score_of_the_pass(monkeypatch):
    monkeypatch.setitem(MIXERS, "shared", KeysOfTheLayerBefore)
    model, half = make_model(attention="shared"), T // 2
    found, _ = probe.layer_meters(model, TOKENS, {}, "float32")
    drawn = torch.randint(TOKENS.numel(), (4, half), generator=torch.Generator().manual_seed(0))  # as the meter draws
    for tokens, check in ((TOKENS, "sink"), (TOKENS.flatten()[drawn].repeat(1, 2), "induction")):
        x, before = model.wte(tokens), 0.0
        for block, layer in zip(model.blocks, found, strict=True):
            q, k, v = ((block.norm_1(x) @ w.T).unflatten(-1, (H, D)) for w in block.mixer.qkv.weight.split(C))
            before = k = k + before
            scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D)
            weights = scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1)
            if check == "sink":
                assert layer["sink"]["share"] == close(weights[:, :, 1:, 0].mean((0, 2)))
            else:
                on_next = torch.stack([weights[:, :, i, i - half + 1] for i in range(half, T)])  # (half, 4, H)
                assert layer["induction"] == close(on_next.mean((0, 1)))
            x = x + torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2) @ block.mixer.out_proj.weight.T
            x = x + block.mlp(block.norm_2(x))
