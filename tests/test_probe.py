"""The meters of a layer, and trials on a model, each on weights set by hand, where the answer is known."""

import copy
import functools
import json
import statistics
import types

import pytest
import torch
from small_models import off_its_start, seen_of

import train
from evaluate import prune_gates, quantise
from gate import GATE_ACTIVATIONS, Gate
from model import MIXERS, GPTConfig, Softmax
from runs import probe

T, C, H, D = 12, 16, 2, 8
X = torch.randn(3, T, C, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(20, (3, T), generator=torch.Generator().manual_seed(1))
every_mixer = pytest.mark.parametrize("name", MIXERS)


def make_model(noise=0.2, **keys):
    """Two layers."""
    keys = dict(n_layer=2, n_embd=C, n_head=H, block_size=T, vocab_size=20, state_size=4, position="none") | keys
    return off_its_start(GPTConfig(**keys), torch.float32, noise)


def data_of(tokens, **kinds):
    """As much of a data set as the meters of a run ask for."""
    batches = lambda split, rows, block_size: iter([(tokens, tokens, None)])  # noqa: E731
    return types.SimpleNamespace(kind="examples", kinds=kinds, longest=lambda split, n: n, eval_batches=batches)


@torch.no_grad()
@pytest.mark.parametrize("granularity, heads", [("elementwise", H), ("headwise", H), ("shared", 1), ("scalar", 1)])
@pytest.mark.parametrize("gate_input", ["token", "static"])
@pytest.mark.parametrize(
    ("value", "activation", "mean", "share"),
    [
        (-40.0, "sigmoid", 0.0, 1.0),
        (0.0, "sigmoid", 0.5, 0.0),
        (40.0, "sigmoid", 1.0, 0.0),
        (-3.0, "silu", 0.1423, 0.0),  # by its size
        (-3.0, "add_silu", 0.1423, 0.0),  # what it adds
        (2.0, "identity", 2.0, 0.0),
    ],
)
def test_the_meter_of_a_gate_of_one_value(value, activation, mean, share, gate_input, granularity, heads):
    config = GPTConfig(n_embd=C, n_head=H, gate_activation=activation, gate_bias=0.0, gate_input=gate_input)
    gate = Gate(config, granularity, H, D)
    for p in gate.parameters():
        p.zero_()
    logits = gate.proj.bias if gate.static is None else gate.static
    logits.fill_(value)
    meter = probe.gate_meter(gate, gate.logits(X))
    assert meter["mean"] == [pytest.approx(mean, abs=1e-4)] * heads and meter["below_0.1"] == [share] * heads
    place = min(int(20 * mean), 20) - (mean == 1)  # the last bin holds what is above 1
    assert meter["histogram"] == [[float(i == place) for i in range(21)]] * heads


SHARE = torch.tensor(-3.0).sigmoid().item()
BOUNDED = {"sigmoid": SHARE, "sigmoid2": SHARE, "non_sparse": SHARE, "hardsigmoid": 0.0}


@torch.no_grad()
@pytest.mark.parametrize("activation", [*GATE_ACTIVATIONS, "hardsigmoid"])
def test_a_gate_is_open_by_a_share_of_what_its_activation_can_reach_if_that_has_bounds(activation, monkeypatch):
    monkeypatch.setitem(GATE_ACTIVATIONS, "hardsigmoid", lambda y, g, slope: y * torch.nn.functional.hardsigmoid(g))
    gate = Gate(GPTConfig(n_embd=C, n_head=H, gate_activation=activation), "elementwise", H, D)
    for p in gate.parameters():
        p.fill_(1.0)
    meter = probe.gate_meter(gate, torch.full((5, H, D), -3.0))
    expected = BOUNDED.get(activation)
    assert meter["open"] == [expected if expected is None else pytest.approx(expected, abs=2e-5)] * H
    assert meter["logits"] == [3.0] * H
    g = torch.randn(3, 5, H, D)
    rms = g.square().mean((0, 1, 3)).sqrt().tolist()
    assert probe.gate_meter(gate, g)["logits"] == pytest.approx(rms, rel=1e-3)


# -- token 0, by query -------------------------------------------------------------------------------------------------


def by_definition(mixer, x, stream, b, h, i):
    """What query i of row b gets from token 0 in head h: every part of the readout on its own, in loops."""
    p, heads = mixer.gated_projection(x), range(mixer.n_head)
    weights, v = (
        probe.weights_of(seen_of(mixer, x))[b, :, i],
        p.v[b].repeat_interleave(mixer.n_head // p.v.shape[2], dim=1),
    )
    parts = torch.stack([torch.stack([weights[head, j] * v[j, head] for head in heads]) for j in range(T)])  # (T, H, D)
    readout, factor = parts.sum(0), mixer.config.branch_scale * torch.ones_like(v[0])
    if p.skip is not None:
        readout = readout + p.skip[b, i]
    norm = [] if mixer.norm is None else ["norm"]
    activation = ["silu"] if isinstance(mixer, MIXERS["silu_readout"]) else []
    for step in (*mixer.before_norm, *norm, *activation, *mixer.after_norm):
        if step == "norm":
            over = (-2, -1) if mixer.norms_heads_together else (-1,)
            by = (readout.square().mean(over, keepdim=True) + 1e-5).rsqrt() * mixer.norm.weight.view(-1, v.shape[2])
        else:
            by = readout.sigmoid() if step == "silu" else step.value(step.logits(x))[b, i]
        readout, factor = readout * by, factor * by
    written = mixer.out_proj.weight.view(C, mixer.n_head, -1)[:, h] @ (factor * v[0])[h]  # with a weight of one
    if "output" in mixer.gates:
        written = written * mixer.gates["output"].value(mixer.gates["output"].logits(x))[b, i, 0]
    to_sink = {} if p.sink is None else {"to_sink": 1 - weights[h].sum()}
    shares = torch.cat([weights[h].abs(), *(value[None] for value in to_sink.values())])
    shares = shares / shares.sum()
    return to_sink | {
        "share": shares[0],
        "entropy": -sum(share * share.log() for share in shares if share > 0),
        "effective": (weights[h, 0] * written).norm() / stream[b, i].norm(),
    }


@torch.no_grad()
def test_a_sink_that_gets_nothing_leaves_the_entropy_at_least_zero():
    """In float32 the weights of the keys may sum to more than one."""
    mixer = make_model(noise=0.3, attention="sink_head").blocks[0].mixer
    mixer.sink.logit.fill_(-40.0)
    found = probe.query_meters(seen_of(mixer, X))
    assert (found["to_sink"] < 0).any() and (found["entropy"] > -1e-4).all()


@torch.no_grad()
@pytest.mark.parametrize(
    "keys",
    [dict(attention=name, gate="elementwise+headwise@value") for name in MIXERS if MIXERS[name].explicit_weights]
    + [
        dict(gate="elementwise@output"), dict(gate="elementwise", attention="sink_token"),
        dict(gate="headwise", n_kv_head=1),
        dict(gate="elementwise", readout_norm="rms", norm_first=False),
        dict(gate="headwise", readout_norm="rms", attention="silu_readout", branch_scale=0.3),
        dict(attention="mamba2", gate="native+elementwise"), dict(attention="gla", gate="native"),
        dict(attention="cosformer", gate="headwise@denominator"),
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)  # fmt: skip
def test_what_a_query_gets_from_token_0_is_the_definition(keys):
    mixer = make_model(noise=0.3, **keys).double().blocks[0].mixer
    x, stream = X.double(), 3 * X.double().flip(0)
    found = probe.query_meters(seen_of(mixer, x, stream))
    for b, h, i in ((0, 0, 1), (1, mixer.n_head - 1, 5), (2, 0, T - 1)):
        for name, value in by_definition(mixer, x, stream, b, h, i).items():
            torch.testing.assert_close(found[name][b, h, i], value, rtol=1e-8, atol=1e-12, msg=name)


@torch.no_grad()
def test_kinds_of_query_are_measured_apart_and_position_0_is_in_none():
    mixer = make_model(gate="headwise", gate_bias=0.0, n_kv_head=1).blocks[0].mixer
    tokens = torch.tensor([[1, 5, 1, 6, 2, 7, 1, 5, 8, 9, 5, 5]])
    masks = probe.query_masks(tokens, {"one": [1, 2], "five": [5]})
    positions = {name: mask[0].nonzero().flatten().tolist() for name, mask in masks.items()}
    assert positions == {"one": [2, 4, 6], "five": [1, 7, 10, 11], "other": [3, 5, 8, 9]}
    assert probe.query_masks(tokens, {}) == {}
    x = X[:1].clone()
    x[:, 0] *= 0.1  # the value of token 0 is the smallest
    sink, each = probe.sink_meter(seen_of(mixer, x), masks), probe.query_meters(seen_of(mixer, x))
    gate, close = mixer.gates["readout"], functools.partial(pytest.approx, rel=1e-3)
    for name, own in (positions | {"all": range(1, T)}).items():
        kind = sink["kinds"].get(name, sink)
        for meter in ("share", "effective"):
            assert kind[meter] == close(each[meter][0][:, own].mean(1).tolist())
        if name != "all":
            values = gate.value(gate.logits(x))[0, own, :, 0]
            assert kind["gates"]["readout"]["mean"] == close(values.mean(0).tolist())
    sizes = mixer.project(x, None, 0).v[0, :, 0].norm(dim=-1).tolist()  # of the values, which all heads share
    assert sink["value_norm"] == [close(sizes[0] / statistics.median_low(sizes[1:]))] * H


@torch.no_grad()
def test_losses_by_kind_are_those_of_their_labels_and_their_mean_is_the_loss():
    model, targets = make_model(), TOKENS.roll(-1, 1)
    masks = probe.query_masks(TOKENS, {"low": list(range(10))}) | {"none": torch.zeros_like(TOKENS) > 0}
    losses = probe.losses_by_kind(model, model.features(TOKENS)[0], targets, masks, "float32")
    of_labels = torch.nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), targets.flatten(), reduction="none")
    assert losses.pop("none") is None
    assert losses == {name: pytest.approx(of_labels[masks[name].flatten()].mean().item(), rel=1e-3) for name in losses}


# -- the residual stream, and the look inside --------------------------------------------------------------------------


@torch.no_grad()
def test_the_branch_is_what_a_mixer_adds_and_the_largest_activation_is_found(monkeypatch):
    model, tokens = make_model(gate="elementwise"), TOKENS.where(TOKENS != 7, 6)
    tokens[2, 5] = 7
    model.wte.weight[7, 3] = -1000.0
    (layers, _), block, x = probe.layer_meters(model, tokens, {}, "float32"), model.blocks[0], model.wte(tokens)
    added = block.mixer(block.norm_1(x))
    assert layers[0]["branch"] == pytest.approx((added.norm(dim=-1) / x.norm(dim=-1)).mean().item(), rel=1e-3)
    for found in (layer["residual"] for layer in layers):
        assert [found[name] for name in ("position", "token", "channel")] == [5, 7, 3]
        assert found["max"] == pytest.approx(1000, rel=1e-2) and found["max_over_median"] > 100
    monkeypatch.setattr(probe, "TRAINING_LENGTH", 4)  # of a long row: weights take memory with its square
    of_run = probe.training_meters(model, data_of(tokens), T, "float32")
    assert len(of_run["branch"]) == 2 and of_run["sink_baseline"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3, 1e-3)


@torch.no_grad()
def test_the_induction_score_is_the_weight_on_what_followed_the_same_token():
    model = make_model(n_layer=3)
    half, (perfect, even, _) = T // 2, (block.mixer for block in model.blocks)
    perfect.has_positive_weights = False
    followed, same = (torch.eye(T).roll(distance, 0) for distance in (half - 1, half))
    perfect.explicit_weights = lambda p: torch.stack([-2.0 * followed, same]).expand(len(p.q), H, T, T)
    even.explicit_weights = lambda p: torch.ones(len(p.q), H, T, T).tril()
    found = probe.induction_meters(model, TOKENS, "float32")
    uniform = sum(1 / (i + 1) for i in range(half, 2 * half)) / half
    assert found[0] == [1.0, 0.0] and found[1] == pytest.approx([uniform] * H, rel=1e-3) and len(found) == 3
    assert probe.training_meters(model, data_of(TOKENS), T, "float32")["induction"] == found


@every_mixer
def test_every_mixer_has_every_meter(name):
    model = make_model(attention=name, gate="native+elementwise+headwise@value")
    layers, _ = probe.layer_meters(model, TOKENS, {}, "float32")
    assert json.loads(json.dumps(layers, allow_nan=False)) == layers
    assert all(set(layer["gates"]) == set(model.blocks[0].mixer.gates) for layer in layers)
    kind = "proxy" if MIXERS[name].explicit_weights else "none"
    if issubclass(MIXERS[name], Softmax) and name != "xsa":  # whose weights of own values may be negative
        kind = "weights"
    elif name == "cosformer":
        kind = "share"
    assert all(layer["sink"]["kind"] == kind for layer in layers)


def test_a_probe_leaves_no_trace_and_a_compiled_model_is_not_compiled_again():
    model = make_model(gate="elementwise").train()
    compiled = torch.compile(model, backend="eager")
    before = compiled(TOKENS)
    with torch._dynamo.config.patch(error_on_recompile=True):
        probe.training_meters(model, data_of(TOKENS, some=[1, 2, 3]), T, "float32")
        assert torch.equal(compiled(TOKENS), before)
    with pytest.raises(ZeroDivisionError):
        probe.probe(model, TOKENS, lambda seen: 1 / 0)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not vars(module).keys() & {"read", "act", "forward"}


def test_a_spike_is_five_deviations_above_the_last_hundred():
    steady = [2.0, 4.0] * 50  # mean 3, deviation 1
    assert train.is_spike(8.01, steady) and not train.is_spike(7.99, steady)
    assert train.is_spike(8.01, [100.0] * 50 + steady)  # older losses do not count
    assert not train.is_spike(1e9, steady[:10])  # too few to tell


# -- pruning and 8 bits ------------------------------------------------------------------------------------------------


@torch.no_grad()
@every_mixer
def test_pruning_above_every_value_closes_all_and_at_0_changes_nothing(name):
    model = make_model(attention=name, gate="elementwise")
    before = model(TOKENS)
    closed = copy.deepcopy(model)
    prune_gates(model, 0.0)
    assert torch.equal(model(TOKENS), before)
    probe.layer_meters(model, TOKENS, {}, "float32")  # which leave the pruning as it was
    prune_gates(closed, 1.01)
    pruned = closed(TOKENS)
    for block in closed.blocks:
        block.mixer.out_proj.weight.zero_()
    torch.testing.assert_close(pruned, closed(TOKENS))
    assert not torch.equal(pruned, before)


def test_the_largest_activation_is_none_where_that_of_a_layer_is_not_finite():
    assert probe.maximum([1.0, 2.0]) == 2.0 and probe.maximum([1.0, None]) is None


@torch.no_grad()
def test_a_gate_on_the_denominator_is_not_pruned():
    model = make_model(attention="cosformer", gate="headwise@denominator")
    before = model(TOKENS)
    prune_gates(model, 1.01)
    assert torch.equal(model(TOKENS), before)


@torch.no_grad()
def test_eight_bits_keep_what_they_can_say_and_lose_what_an_outlier_hides():
    model, x, other = make_model(), torch.zeros(1, C), torch.randn(1, C)
    up, key = model.blocks[0].mlp.up, model.blocks[0].mixer.out_proj
    up.weight[:, 0], up.weight[:, 1:] = 127.0, torch.randint(-127, 128, up.weight[:, 1:].shape).float()
    up.weight[0] /= 1024  # a row has a scale of its own
    x[0, 0], x[0, 1] = 127.0, 0.4  # 0.4 is less than half a level
    table, exact, fine = model.wte.weight.clone(), up(torch.eye(C)[1:2]), key(other)
    quantise(model)
    torch.testing.assert_close(up(x), 127.0 * up.weight[:, 0][None])
    torch.testing.assert_close(up(torch.eye(C)[1:2]), exact)  # these weights are levels
    assert 0 < (key(other) - fine).abs().max() < 0.05 * fine.abs().max()
    assert torch.equal(model.wte.weight, table)
