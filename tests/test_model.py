"""The model against its definitions: gates, mixers, initialisation, refusals.

What every mixer promises is in test_contract.py, softmax layers are in test_softmax.py, published layers and models,
GPT-2 and a gated softmax among them, in test_oracles.py and test_anchors.py, and edits in test_edits.py.
"""

import itertools
import math

import edits
import pytest
import torch
import torch.nn.functional as F
from small_models import off_its_start
from test_recurrence import definition

import gate
import model as model_file
import variants
from base.configurator import UserError
from gate import GATE_ACTIVATIONS
from keys import GRANULARITIES, keys_of_today, parse_gate
from mixer import DENOMINATOR_MIN
from model import GLA, GPT, MIXERS, MLP, MLPS, GPTConfig, Softmax
from runs.probe import Seen, weights_of

T, C, H, D = 40, 32, 4, 8
every_mixer = pytest.mark.parametrize("name", MIXERS)
CLOSE = dict(rtol=1e-12, atol=1e-13)
IDX = torch.randint(50, (3, T), generator=torch.Generator().manual_seed(1))


def make_config(**keys):
    return GPTConfig(**(dict(n_layer=2, n_embd=C, n_head=H, block_size=T, vocab_size=50, state_size=8) | keys))


def make_mixer(name, gate="none", **keys):
    return off_its_start(make_config(attention=name, gate=gate, **keys)).blocks[0].mixer


def random_x(length=T):
    return torch.randn(2, length, C, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def in_pieces(mixer, x, *lengths):
    """The output of a text that is read in pieces of these lengths, and then token by token."""
    state, start, outputs = mixer.init_state(2, dtype=x.dtype), 0, []
    for n in (*lengths, *[1] * (x.shape[1] - sum(lengths))):
        outputs.append(mixer(x[:, start : start + n], state, start))
        start += n
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("part, has_weights", [("project", True), ("read", False), ("forward", False)])
def test_weights_and_linearity_are_inherited_until_the_readout_is_another(part, has_weights, helpers):
    child = type("Child", (GLA,), {part: lambda self, *args: None})
    for cls in (child, type("Grandchild", (child,), {})):
        assert (cls.explicit_weights is not None) == has_weights
        assert cls.is_linear_in_query == has_weights
    if not has_weights:
        seen = Seen(child(make_config(), parse_gate("none")))
        message = helpers.error_of(weights_of, seen)
        assert message == "Child: its readout is its own, so explicit_weights must be, too"


# -- the gate ----------------------------------------------------------------------------------------------------------


def like(mixer, source):
    """mixer, with the parameters that it shares with source."""
    mixer.load_state_dict(source.state_dict(), strict=False)
    return mixer


@every_mixer
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_gate_and_a_branch_scale_are_factors_on_what_the_output_projection_gets(name, granularity):
    ungated, x, seen = make_mixer(name), random_x(), []
    gated = like(make_mixer(name, granularity, gate_activation="silu", branch_scale=0.3), ungated)
    ungated.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ungated(x)
    (H, D), g = (ungated.n_head, ungated.value_width), x @ gated.gates["readout"].proj.weight.T
    shape = {"elementwise": (H, D), "headwise": (H, 1), "shared": (1, D), "scalar": (1, 1)}[granularity]
    o = 0.3 * F.silu(g).view(2, T, *shape) * seen[0].view(2, T, H, D)
    torch.testing.assert_close(gated(x), o.flatten(2) @ ungated.out_proj.weight.T, **CLOSE)


@every_mixer
@pytest.mark.parametrize("rank", [0, 2])
def test_a_narrow_gate_is_its_definition_and_other_channels_do_not_matter(name, rank):
    """g = W_g x[:3] + b, of each position; a native gate reads all channels."""
    keys = dict(gate_width=3, gate_rank=rank, gate_bias=0.5, gate_activation="silu")
    ungated, x, seen = make_mixer(name, "native"), random_x(), []
    gated = like(make_mixer(name, "native+headwise+elementwise@output", **keys), ungated)
    ungated.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ungated(x)
    g, others = {}, torch.cat([x[..., :3], torch.randn_like(x[..., 3:])], dim=-1)
    for position in ("readout", "output"):
        one = gated.gates[position]
        W = one.proj.weight if rank == 0 else one.proj.weight @ one.down.weight
        assert W.shape == (gated.n_head if position == "readout" else C, 3)
        g[position] = torch.einsum("btc,nc->btn", x[..., :3], W) + one.proj.bias
        assert torch.equal(one.logits(others), one.logits(x))
        assert not torch.equal(one.logits(others.flip(-1)), one.logits(x))
    o = seen[0].unflatten(-1, (gated.n_head, -1)) * F.silu(g["readout"])[..., None]
    expected = o.flatten(2) @ ungated.out_proj.weight.T * F.silu(g["output"])
    torch.testing.assert_close(gated(x), expected, **CLOSE)
    if "native" in gated.gates:
        native = gated.gates["native"]
        assert (native.down or native.proj).in_features == C


@pytest.mark.parametrize("gate_input", ["token", "static"])
def test_a_narrow_gate_has_so_many_fewer_parameters_and_a_static_one_as_many(gate_input):
    keys = dict(gate="elementwise+headwise@value", gate_input=gate_input, mlp_ratio=8)
    wide, narrow, full = (off_its_start(make_config(gate_width=width, **keys)) for width in (None, 3, C))
    fewer = 2 * (H * D + H) * (C - 3) if gate_input == "token" else 0
    assert wide.n_params() - narrow.n_params() == fewer
    assert wide.flops_per_token() - narrow.flops_per_token() == 2 * fewer
    assert torch.equal(full(IDX), wide(IDX))


@pytest.mark.parametrize("name, position, path", [("gated_deltanet2", "key", "erase"), ("mamba2", "value", "skip")])
def test_a_gate_on_keys_or_values_is_on_both_of_their_paths(name, position, path):
    mixer, x = make_mixer(name, f"elementwise@{position}"), random_x()
    ungated, gated = mixer.project(x, None, 0), mixer.gated_projection(x)
    expected = mixer.gates[position](getattr(ungated, path), x)
    torch.testing.assert_close(getattr(gated, path), expected, **CLOSE)


@every_mixer
@pytest.mark.parametrize("readout_norm", ["none", "published"])
def test_with_one_token_a_value_gate_is_a_readout_gate(name, readout_norm):
    """Where a norm follows the readout, the gate has to come before it, and norm_first=False is that order."""
    if name == "silu_readout":
        pytest.skip("its readout is not linear in the values")
    norm = MIXERS[name].published_norm if readout_norm == "published" else readout_norm
    on_value, x = make_mixer(name, "elementwise@value", readout_norm=readout_norm), random_x(1)
    on_readout = make_mixer(name, "elementwise", readout_norm=readout_norm, norm_first=norm != "rms")
    like(on_readout, on_value).gates["readout"].load_state_dict(on_value.gates["value"].state_dict())
    torch.testing.assert_close(on_readout(x), on_value(x), rtol=1e-10, atol=1e-12)


def test_activations_are_their_formulas_and_the_positive_ones_are_positive():
    y, g, slope = 1.7, torch.linspace(-4, 4, 33, dtype=torch.float64), torch.tensor([0.3]).double()
    sigmoid = 1 / (1 + torch.exp(-g))
    expected = {
        "sigmoid": y * sigmoid, "sigmoid2": y * 2 * sigmoid, "non_sparse": y * (1 + sigmoid) / 2,
        "silu": y * g * sigmoid, "gelu": y * g * (1 + torch.erf(g / math.sqrt(2))) / 2, "tanh": y * torch.tanh(g),
        "identity": y * g, "learned": y * g / (1 + torch.exp(-slope * g)),
        "add_silu": y + g * sigmoid, "add_identity": y + g,
    }  # fmt: skip
    assert expected.keys() == GATE_ACTIVATIONS.keys()
    for name, formula in expected.items():
        torch.testing.assert_close(GATE_ACTIVATIONS[name](y, g, slope), formula, **CLOSE)
        assert gate.is_positive(name) == (name in ("sigmoid", "sigmoid2", "non_sparse")), name
        assert gate.is_factor(name) == (not name.startswith("add_")), name


@pytest.mark.parametrize("position", ["readout", "value", "output"])
def test_a_gate_whose_start_has_no_slope_is_refused(position, monkeypatch):
    """relu(0) = 0 with slope 0: W, which starts at zero, would never get a gradient, and the layer would stay dead."""
    monkeypatch.setitem(gate.GATE_ACTIVATIONS, "relu", lambda y, g, slope: y * F.relu(g))
    monkeypatch.setitem(gate.GATE_ACTIVATIONS, "add_relu", lambda y, g, slope: y + F.relu(g))
    for activation in ("relu", "add_relu"):
        keys = dict(gate=f"elementwise@{position}", gate_activation=activation)
        for more in ({}, dict(gate_input="static"), dict(gate_bias=-1.0)):
            with torch.no_grad(), pytest.raises(UserError, match="no slope at the start of the gate"):
                make_config(**keys, **more)
        make_config(**keys, gate_bias=1.0)


def test_the_one_line_of_a_new_activation_is_all_that_checks_meters_and_later_gates_need(monkeypatch):
    """y + tanh(g) is no factor: a norm does not cancel it, its value is tanh(g), and it is the identity at g = 0."""
    monkeypatch.setitem(GATE_ACTIVATIONS, "add_tanh", lambda y, g, slope: y + g.tanh())
    monkeypatch.setitem(GATE_ACTIVATIONS, "relu", lambda y, g, slope: y * F.relu(g))
    before_norm = dict(attention="gla", gate="headwise", norm_first=False)
    make_config(**before_norm, gate_activation="add_tanh")
    with pytest.raises(UserError, match="a norm behind it cancels"):
        make_config(**before_norm, gate_activation="relu", gate_bias=1.0)
    with pytest.raises(UserError, match="can make its denominator negative"):
        make_config(attention="cosformer", gate="elementwise@key", gate_activation="add_tanh")
    g = torch.linspace(-2, 2, 9)
    for activation, value in (("add_tanh", g.tanh()), ("relu", g.relu())):
        one = gate.Gate(make_config(gate_activation=activation), "elementwise", H, D)
        assert torch.equal(one.value(g), value)
        with torch.device("meta"):
            assert one.is_factor == (activation == "relu")


# -- the definitions ---------------------------------------------------------------------------------------------------


def test_cosformer_is_the_published_formula():
    """Qin et al. 2022, equation 10, with M = T, as the matrix of weights; i and j count from 1."""
    mixer, x = make_mixer("cosformer"), random_x()
    x[:, 3] = 0  # a query without weights: 0 / 0, but for the smallest denominator
    q, k, v = ((x @ w.T).view(2, T, H, D) for w in mixer.qkv.weight.split(C))
    i = torch.arange(1, T + 1).double()
    cosine = torch.cos(math.pi / 2 * (i[:, None] - i[None, :]) / T).tril()
    weights = torch.einsum("bihd,bjhd->bhij", q.relu(), k.relu()) * cosine
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=DENOMINATOR_MIN)
    expected = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2) @ mixer.out_proj.weight.T
    torch.testing.assert_close(mixer(x), expected, **CLOSE)


@pytest.mark.parametrize(
    ("name", "n", "beta_max"),
    [("deltaproduct3", 3, 2), ("deltaproduct", 2, 2), ("gated_deltanet", 1, 2), ("deltanet", 1, 2), ("deltanet", 1, 1)],
)
def test_the_delta_rule_is_its_definition(name, n, beta_max, monkeypatch):
    """Siems et al. 2025: a token decays the state once, writes n values to it, and reads it at its end."""
    three = type("DeltaProduct3", (variants.DeltaProduct,), {"n_steps": 3})
    monkeypatch.setitem(MIXERS, "deltaproduct3", three)
    keys = dict(delta_sizes=[3, 6, 4, 5], short_conv=0, beta_max=beta_max)
    mixer, x = make_mixer(name, **keys), random_x()
    sizes = [12, n * 12, n * 30, n * 6, *[6] * (name != "deltanet")]  # deltanet has no decay
    q, k, v, beta, *dt = (x @ mixer.in_proj.weight.T).split(sizes, dim=-1)
    q, k, v = (F.silu(y).view(2, T, -1, heads, D) for y, heads, D in ((q, 3, 4), (k, 3, 4), (v, 6, 5)))
    q, k = ((y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(2, dim=3) for y in (q, k))
    decay = (-mixer.A_log.exp() * F.softplus(dt[0] + mixer.dt_bias)).exp() if dt else torch.ones(2, T, 6)
    beta = beta_max * beta.sigmoid().view(2, T, n, 6, 1)
    S, outputs = x.new_zeros(2, 6, 4, 5), []
    for t in range(T):
        S = decay[:, t, :, None, None] * S
        for i in range(n):
            new = beta[:, t, i] * (v[:, t, i] - torch.einsum("bhk,bhkv->bhv", k[:, t, i], S))
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t, i], new)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t, 0] / 2, S))
    o = F.rms_norm(torch.stack(outputs, dim=1), [5], mixer.norm.weight, 1e-5)
    torch.testing.assert_close(mixer(x), o.flatten(2) @ mixer.out_proj.weight.T, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("beta_max", [1, 2])
def test_gated_deltanet2_is_its_definition(beta_max):
    mixer, kda, x = make_mixer("gated_deltanet2", beta_max=beta_max), make_mixer("kda", beta_max=beta_max), random_x()
    qkv, betas = mixer.in_proj.weight.split([3 * C, 2 * C])
    kda.load_state_dict(mixer.state_dict() | {"in_proj.weight": torch.cat([qkv, betas[:H]])})
    p, (erase, write) = kda.project(x, None, 0), (x @ betas.T).sigmoid().view(2, T, 2, H, D).unbind(2)
    keys = dict(log_decay=p.log_decay, beta=torch.ones(2, T, H).double(), erase=beta_max * erase * p.k)
    o = F.rms_norm(definition(p.q, p.k, write * p.v, **keys)[0], [D], mixer.norm.weight, 1e-5)
    torch.testing.assert_close(mixer(x), o.flatten(2) @ mixer.out_proj.weight.T, rtol=1e-9, atol=1e-11)


def test_mamba3_is_its_definition_in_complex_numbers():
    """Lahoti et al. 2026: a share of a token is written at once, the rest with the next; half of the pairs turn."""
    mixer, x, heads = make_mixer("mamba3", "native"), random_x(), 2 * H
    v, k, q, dt, A, share, angle = (x @ mixer.in_proj.weight.T).split([2 * C, 8, 8, heads, heads, heads, 2], dim=-1)
    v, dt, share = v.view(2, T, heads, D), F.softplus(dt + mixer.dt_bias)[..., None], share.sigmoid()[..., None]
    angle = F.pad((math.pi * dt * angle.tanh()[:, :, None]).cumsum(1), (0, 2))  # (2, T, heads, 4)
    own, later, a = share * dt, (1 - share) * dt, (-F.softplus(A)[..., None] * dt).exp()[..., None]
    parts = zip((k, q), mixer.kq_norm.weight.view(2, 8), mixer.kq_bias.view(2, heads, 8), strict=True)
    k, q = (F.rms_norm(y, [8], weight, 1e-5)[:, :, None] + bias for y, weight, bias in parts)
    q, k = (torch.view_as_complex(y.view(2, T, heads, 4, 2)) * torch.polar(angle * 0 + 1, angle) for y in (q, k))
    kv, S, outputs = k[..., None] * v[..., None, :], 0, []
    for t in range(T):
        S = a[:, t] * (S + (later[:, t, ..., None] * kv[:, t - 1] if t else 0)) + own[:, t, ..., None] * kv[:, t]
        outputs.append((q[:, t, :, None].conj() @ S).real.squeeze(2) + mixer.D[:, None] * v[:, t])
    o = torch.stack(outputs, dim=1).flatten(2) * F.silu(x @ mixer.gates["native"].proj.weight.T)
    torch.testing.assert_close(mixer(x), o @ mixer.out_proj.weight.T, rtol=1e-9, atol=1e-11)


def test_mamba3_forgets_in_every_token_however_small_its_a():
    """A is softplus of a projection, which would round to zero: below 1e-4 it is 1e-4."""
    mixer, x = make_mixer("mamba3"), random_x()
    with torch.no_grad():
        rates = mixer.in_proj(x).split(mixer.parts, dim=-1)
        dt = F.softplus(rates[1] + mixer.dt_bias)
    heads = mixer.n_head
    first_of_a = mixer.parts[0] + heads
    with torch.no_grad():
        mixer.in_proj.weight[first_of_a : first_of_a + heads] = -1e3 * x[0, 0]  # softplus(-1e3 |x|^2) = 0
    log_decay = mixer.project(x[:1, :1], None, 0).log_decay
    torch.testing.assert_close(log_decay, -1e-4 * dt[:1, :1])


def test_monarch_is_its_definition_in_dense_matrices():
    """Its transition as a product of four 64 x 64 matrices. P is a permutation, and every block is orthogonal."""
    mixer, x, n = make_mixer("monarch"), random_x(), 64
    with torch.no_grad():
        mixer.skew.mul_(10)  # blocks far from the identity
    q, k, v = (y.view(2, T, H, -1) for y in (x @ mixer.qkv.weight.T).split([H * n, H * n, H * D], dim=-1))
    gates = (x @ mixer.block_gates.weight.T + mixer.block_gates.bias).sigmoid().view(2, T, H, 2, 8)
    P = torch.eye(n).double().view(8, 8, n).transpose(0, 1).reshape(n, n)  # entry (i, j) of P h is (j, i) of h
    W, one = mixer.skew.view(2, H, 8, 8, 8), torch.eye(8).double()
    blocks = torch.linalg.inv(one + W - W.mT) @ (one - W + W.mT)
    assert (blocks @ blocks.mT - one).abs().max() < 1e-12 and (blocks - one).abs().max() > 1
    expected = torch.empty(2, T, H, D).double()
    for b, h in itertools.product(range(2), range(H)):
        S = torch.zeros(n, D).double()
        for t in range(T):
            L, R = (torch.block_diag(*(gates[b, t, h, side, :, None, None] * blocks[side, h])) for side in (0, 1))
            S = P.T @ L @ P @ R @ S + torch.outer(k[b, t, h], v[b, t, h])
            expected[b, t, h] = q[b, t, h] / 8 @ S
    expected = F.rms_norm(expected, [D], mixer.norm.weight, 1e-5).flatten(2) @ mixer.out_proj.weight.T
    torch.testing.assert_close(mixer(x), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mlp", ["gelu_tanh", "swiglu"])
def test_match_params_keeps_the_number_of_parameters_biases_counted(mlp):
    keys = dict(n_embd=16, mlp_ratio=8, mlp=mlp, norm="layer", bias=True)
    plain = GPT(make_config(**keys))
    gates = "elementwise+elementwise@value+elementwise@query+elementwise@key"
    up = plain.blocks[0].mlp.up
    unit = (sum(p.numel() for p in plain.blocks[0].mlp.parameters()) - 16) / up.out_features  # all but down's bias
    for width in (None, 5):
        matched = GPT(make_config(gate=gates, gate_width=width, match_params=True, **keys))
        assert 0 < abs(matched.n_params() - plain.n_params()) <= len(plain.blocks) * unit / 2


KEYS = [  # of every mixer: its parts, and those of others
    dict(gate="native+elementwise"),
    dict(gate="elementwise@value+headwise@key+elementwise@query", short_conv=3, qk_norm=True),
    dict(gate="shared@value+elementwise@key+elementwise@query", gate_input="static", short_conv=0, n_kv_head=2),
    dict(gate="elementwise", readout_norm="rms", rope_scaling="yarn", rope_factor=2.0),
]


@every_mixer
@pytest.mark.parametrize("keys", KEYS)
def test_what_reaches_the_recurrence_has_autocasts_dtype_and_decay_and_beta_are_float32(name, keys):
    """float32 would make the kernels slower; cosFormer's cosines, and what the recurrence sums, come later."""
    if name.startswith("sink_"):
        keys = keys | {"readout_norm": "published"}  # a norm would cancel the sink
    mixer = off_its_start(make_config(attention=name, **keys), torch.float32).blocks[0].mixer
    for project in (lambda x: mixer.project(x, None, 0), mixer.gated_projection):
        with torch.autocast("cpu", torch.bfloat16):
            p = project(random_x().float())
        if project != mixer.gated_projection or name != "cosformer":
            assert {p.q.dtype, p.k.dtype, p.v.dtype} == {torch.bfloat16}
        assert all(x is None or x.dtype == torch.float32 for x in (p.log_decay, p.beta))


# -- construction ------------------------------------------------------------------------------------------------------


@every_mixer
def test_arms_of_one_seed_share_the_weights_they_have_in_common(name):
    models = []
    for seed, arm in ((7, "none"), (7, "native+elementwise+headwise@value"), (8, "none")):
        torch.manual_seed(seed)
        models.append(GPT(make_config(attention=name, gate=arm)).state_dict())
    without, with_gate, other_seed = models
    assert set(without) < set(with_gate)
    assert all(torch.equal(without[key], with_gate[key]) for key in without)
    assert not torch.equal(other_seed["wte.weight"], without["wte.weight"])


@every_mixer
def test_parameters_start_as_promised_and_layers_with_weights_of_their_own(name):
    keys = dict(gate="native+elementwise", gate_bias=1.5, gate_activation="learned", n_embd=256, n_head=16)
    start = dict(GPT(make_config(attention=name, out_init_scale=0.5, **keys)).named_parameters())
    mixer = "blocks.1.mixer."
    spread = {"wte": 0.02, mixer + "out_proj": 0.005, "blocks.0.mlp.down": 0.01, "blocks.0.mlp.up": 0.02}  # 1 / sqrt(4)
    if MIXERS[name].native_gate:
        spread[mixer + "gates.native.proj"] = 0.02
    for module, expected in spread.items():
        assert abs(start[f"{module}.weight"].std() - expected) < expected / 20
    assert not start[mixer + "gates.readout.proj.weight"].any() and start[mixer + "gates.readout.slope"] == 1
    assert (start[mixer + "gates.readout.proj.bias"] == 1.5).all()
    if name in ("mamba2", "gated_deltanet", "deltaproduct"):
        A, dt = start[mixer + "A_log"].exp(), F.softplus(start[mixer + "dt_bias"])
        assert A.min() >= (1.0 if name == "mamba2" else 0.01) and A.max() <= 16 and 4 < A.mean() < 12
        wide = GPT(make_config(attention=name, n_layer=1, n_embd=512, n_head=256)).blocks[0].mixer
        many = wide.A_log.exp()
        assert (many.min() < 1.0) == (name != "mamba2") and many.max() > 15.5
        assert dt.min() >= 0.00099 and dt.max() <= 0.101
        assert F.softplus(wide.dt_bias).min() < 0.0015 and F.softplus(wide.dt_bias).max() > 0.07
        assert abs(start[mixer + "conv.weight"]).max() <= 0.5
    if name == "mamba3":
        assert all((start[mixer + key] == 1).all() for key in ("D", "kq_bias"))
    if name == "monarch":
        assert (start[mixer + "block_gates.bias"] == 4).all() and abs(start[mixer + "skew"].std() - 0.02) < 0.001
    assert all((p == 1).all() for key, p in start.items() if "norm" in key)
    assert not torch.equal(start["blocks.0.mlp.up.weight"], start["blocks.1.mlp.up.weight"])


def test_a_parameter_without_a_rule_for_its_start_is_refused_and_a_module_may_have_a_rule(monkeypatch, helpers):
    class Scaled(MLPS["gelu"]):
        def __init__(self, config, hidden):
            super().__init__(config, hidden)
            self.scale = torch.nn.Parameter(torch.full((config.n_embd,), 2.0))

    monkeypatch.setitem(MLPS, "scaled", Scaled)
    message = helpers.error_of(GPT, make_config(mlp="scaled"))
    assert message == (
        "nothing says how blocks.0.mlp.scale starts: give Scaled a method init_parameter(name, start, generator)"
    )
    Scaled.init_parameter = lambda self, name, start, generator: start.mul_(3.0 if name == "scale" else 0.0)
    assert (GPT(make_config(mlp="scaled")).blocks[0].mlp.scale == 6.0).all()


def test_pytorchs_initialisation_is_that_of_its_modules():
    model = GPT(make_config(init="pytorch", vocab_size=500, n_layer=1, n_embd=64, gate="elementwise"))
    assert abs(float(model.wte.weight.detach().std()) - 1) < 0.02
    for linear in (model.blocks[0].mixer.qkv, model.blocks[0].mlp.down):
        assert 0.98 < float(linear.weight.detach().abs().max()) * linear.in_features**0.5 <= 1
    assert not model.blocks[0].mixer.gates["readout"].proj.weight.any()  # a gate starts as it always does


def test_gated_is_blagpts_name_and_patterns_repeat():
    config = make_config(attention="gated")
    assert (config.attention, config.gate) == ("softmax", "elementwise")
    layers = make_config(attention="gla,gla,softmax", gate="native,headwise", n_layer=5).layers()
    assert [name for name, _ in layers] == ["gla", "gla", "softmax", "gla", "gla"]
    assert [gate.native for _, gate in layers] == [True, False, True, False, True]


REFUSED = [
    (dict(attention="sofmax"), "did you mean 'softmax'"),
    (dict(gate="headwise@valeu"), "did you mean 'value'"),
    (dict(gate="none+headwise"), "'none' is one too many"),
    (dict(gate="headwise+elementwise"), "'elementwise' is one too many"),
    (dict(attention="kda", gate="headwise@output"), "of kda: .* has mixed the heads"),
    (dict(gate="headwise@denominator"), "has no denominator"),
    (dict(attention="cosformer", gate="elementwise@key", gate_activation="silu"), "denominator negative"),
    (dict(attention="cosformer", gate="elementwise", norm_first=False), "no layer has a norm"),
    (dict(attention="gla,softmax", gate="none,headwise", norm_first=False), "no layer has a norm"),
    (dict(attention="gla", readout_norm="denominator"), "both signs"),
    (dict(delta_sizes=[3, 4, 8, 8]), "must be four numbers, of which the first divides the second"),
    (dict(attention="mamba2,softmax", n_embd=12), "must be an even number of at least 2"),
    (dict(attention="gla,monarch", block_size=65), "monarch takes at most 64; it runs token by token, since"),
    (dict(attention="deltanet", beta_max=1.5), "beta_max=1.5: must be one of 1.0, 2.0"),
    (dict(attention="softmax,gla", bias=True), "gla has no biases; leave bias out"),
    (dict(readout_norm="denominator"), "its weights sum to one already"),
    (dict(levels="log_linear"), "no layer of softmax has a recurrent state"),
    (dict(gate="headwise", gate_width=33), "gate_width=33: must be at most n_embd=32, or None for all"),
    (dict(gate="headwise", gate_width=0), "gate_width=0: must be a whole number of at least 1, or None"),
    (dict(attention="xsa", readout_norm="denominator"), "makes no sense for xsa"),
]


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_what_makes_no_sense_is_refused_in_one_line(keys, words):
    with pytest.raises(UserError, match=words) as error:
        make_config(**keys)
    assert "\n" not in str(error.value)


WITHOUT_EFFECT = [
    dict(attention="cosformer", gate="headwise@query"),
    dict(attention="gla", gate="headwise@query"),
    dict(attention="gla", gate="headwise", norm_first=False),
    dict(attention="mamba2", gate="scalar", norm_first=False),
]
WITH_EFFECT = [
    dict(attention="cosformer", gate="headwise@value", gate_input="static"),
    dict(attention="gla", gate="headwise@readout+scalar@value"),
    dict(attention="gla", gate="headwise@query", gate_activation="add_silu"),
    dict(attention="gated_deltanet", gate="headwise@key", gate_input="static"),
    dict(attention="mamba2", gate="headwise", norm_first=False),
    dict(attention="mamba2", gate="scalar@query"),
    dict(attention="gla,cosformer", gate="elementwise", norm_first=False),
]


@torch.no_grad()
@pytest.mark.parametrize("keys", WITHOUT_EFFECT + WITH_EFFECT, ids=str)
def test_a_gate_is_refused_if_it_changes_nothing(keys, monkeypatch):
    if keys in WITHOUT_EFFECT:
        with pytest.raises(UserError, match="has no effect, because a norm behind it cancels"):
            make_config(**keys)
        monkeypatch.setattr(model_file, "check_gate", lambda *args: None)
    model = off_its_start(make_config(norm_eps=1e-30, **keys))
    before, gates = model(IDX), [p for name, p in model.named_parameters() if ".gates." in name]
    for p in gates:
        p.add_(0.3)
    assert torch.allclose(model(IDX), before, rtol=0, atol=1e-9) == (keys in WITHOUT_EFFECT)


MIXING = {  # of one layer at context T: a multiply-add is 2; a state is decayed (1), written (2) and read (2)
    "softmax": lambda T: 2 * (2 * H * D) * (T + 1) / 2,
    "cosformer": lambda T: 5 * H * (2 * D) * D,
    "gla": lambda T: 5 * H * D * D,
    **dict.fromkeys(("mamba2", "mamba3"), lambda T: 5 * (2 * H) * 8 * D),
    # read once more, under k
    **dict.fromkeys(("gated_deltanet", "deltanet", "kda", "kda_fla", "gated_deltanet2"), lambda T: 7 * H * D * D),
    "deltaproduct": lambda T: 2 * 7 * H * D * D,
    # two products with a row of 8, two sigmoids, written and read
    "monarch": lambda T: (2 * 2 * 8 + 2 + 4) * H * 64 * D,
    # a token writes its own (2), and half of the levels are decayed and read, with the delta rule read and written, too
    "gla log_linear": lambda T: (2 + 3 * math.log2(T) / 2) * H * D * D,
    "gated_deltanet log_linear": lambda T: (2 + 7 * math.log2(T) / 2) * H * D * D,
}


@pytest.mark.parametrize("name", [*MIXERS, "gla log_linear", "gated_deltanet log_linear"])
@pytest.mark.parametrize("position", ["none", "learned"])
def test_flops_are_the_count_by_hand(name, position):
    attention, _, levels = name.partition(" ")
    model = GPT(make_config(attention=attention, levels=levels or "none", position=position, n_layer=1))
    parameters = model.n_params() - (T * C if position == "learned" else 0)  # a position's row is looked up
    for context in (T, 10 * T):
        count = MIXING["softmax" if issubclass(MIXERS[attention], Softmax) else name]
        expected = 2 * parameters + count(context)
        assert model.flops_per_token(context) == pytest.approx(expected, rel=1e-12, abs=0)
    assert model.flops_per_token() == model.flops_per_token(T)


# -- loss and dropout --------------------------------------------------------------------------------------------------


def test_the_loss_is_the_sum_of_the_losses_of_the_tokens_and_may_be_replaced_in_three_lines(monkeypatch):
    model = off_its_start(make_config())
    targets = IDX.roll(-1, 1).masked_fill(torch.rand(3, T) < 0.3, -100)
    each = model_file.token_losses(model(IDX), targets)
    assert each.shape == targets.shape and (each[targets == -100] == 0).all()
    x, _ = model.features(IDX)
    torch.testing.assert_close(model.loss(x, targets), each.sum(), rtol=1e-6, atol=0, check_dtype=False)

    def loss(self, x, targets):
        logits = self.logits(x)
        z = logits[targets != -100].logsumexp(-1)
        return model_file.token_losses(logits, targets).sum() + 0.5 * z.square().sum()

    monkeypatch.setattr(GPT, "loss", loss)
    z = model(IDX)[targets != -100].logsumexp(-1)
    total = each.sum() + 0.5 * z.square().sum()
    torch.testing.assert_close(model(IDX, targets, reduction="sum"), total, rtol=1e-6, atol=0, check_dtype=False)


def test_keys_of_an_older_version_are_the_classes_of_now_or_are_refused_with_the_commit_that_had_them():
    old = dict(n_layer=2, sink="none", attention_weights="softmax", forget_gate=False, attention_softcap=None)
    assert keys_of_today(old | {"n_householder": 2}) == {"n_layer": 2}
    assert keys_of_today({"attention": "kda,softmax", "native_bias": True}) == {"attention": "kda_fla,softmax"}
    sizes = dict(n_head=4, head_dim=8, delta_key_heads=2, delta_value_dim=16)
    assert keys_of_today(sizes) == dict(n_head=4, head_dim=8, delta_sizes=[2, 4, 8, 16])
    sizes = dict(n_head=4, head_dim=8, delta_heads=8)
    assert keys_of_today(sizes)["delta_sizes"] == [8, 8, 8, 8]
    assert keys_of_today(old | {"sink": "head", "attention": "softmax, gla"})["attention"] == "sink_head,gla"
    for key, name in (
        ("fox", {"forget_gate": True}),
        ("softcap", {"attention_softcap": 50.0}),
        ("qwen2", {"qkv_bias": True}),
        ("qwen3_next", {"rope_fraction": 0.25}),
    ):
        assert keys_of_today(old | name)["attention"] == key
    assert MIXERS["softcap"].cap == 50.0
    gone = dict(memory_check=True, eval_batch_size=64, lr_decay_iters=None)
    assert keys_of_today(gone | dict(decay_lr=False, new_lr_scale=1.0, gate_lr_scale=2.0)) == {
        "schedule": "constant",
        "gate_lr_scale": 2.0,
    }
    assert keys_of_today(dict(decay_lr=True, new_lr_scale=10.0)) == {"gate_lr_scale": 10.0}
    before = dict(schedule=None, max_iters=9, lr_decay_iters=9)  # as the checkpoints of 65a93f7 have them
    assert keys_of_today(before | dict(decay_lr=True)) == dict(schedule="cosine", max_iters=9)
    assert keys_of_today(before | dict(decay_lr=False)) == dict(schedule="constant", max_iters=9)
    for mlp in ("gelu", "swiglu"):
        keys = dict(n_layer=1, n_head=1, n_embd=24, vocab_size=2, mlp=mlp)
        width = GPT(GPTConfig(**keys_of_today(keys | {"mlp_width": 37}))).blocks[0].mlp.up.out_features
        assert width == 37
    refused = {
        "27a232e": [{"forget_gate": True, "sink": "zero"}, {"attention_softcap": 3.0}, {"n_householder": 3}],
        "65a93f7": [{"lr_decay_iters": 5}],
        "3c5ad23": [{"post_norm": True}, {"rope_fraction": 0.5}, {"pad_vocab_to": 64}, {"native_bias": True}],
    }
    for commit, cases in refused.items():
        for wrong in cases:
            with pytest.raises(UserError, match=f"not in this version; commit {commit} is the last that has it"):
                keys_of_today(old | wrong)


@every_mixer
@pytest.mark.parametrize("gate", ["none", "native+elementwise+headwise@value+elementwise@output"])
def test_the_last_layer_computes_labelled_tokens_only_and_loss_and_gradients_are_those_of_all(name, gate):
    model = off_its_start(make_config(attention=name, gate=gate))
    parameters = list(model.parameters())
    targets = IDX.roll(-1, 1).masked_fill(torch.rand(3, T) < 0.8, -100)
    targets[1] = -100
    sparse = model(IDX, targets)
    full = F.cross_entropy(model(IDX).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(sparse.double(), full, rtol=1e-6, atol=0)
    torch.testing.assert_close(model(IDX, targets, reduction="sum"), sparse * (targets != -100).sum())
    gradients = torch.autograd.grad(sparse, parameters), torch.autograd.grad(full, parameters)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)
    model(IDX, torch.full_like(targets, -100)).backward()  # a micro-step without any label
    assert all(p.grad is not None and not p.grad.any() for p in parameters)


class TokenShift(MLP):
    """An MLP that also sees the token before."""

    def forward(self, x):
        return super().forward(x + F.pad(x[:, :-1], (0, 0, 1, 0)))


class Counting(MLP):
    """An MLP with an auxiliary loss over all tokens that it meets."""

    def forward(self, x):
        self.auxiliary_loss = 0.1 * x.square().mean() + 0.001 * x.shape[1]
        return super().forward(x)


def loss_of_all(model, idx, targets):
    """The loss where every token is computed, as on a GPU."""
    logits = model(idx)
    auxiliary = sum(getattr(module, "auxiliary_loss", 0.0) for module in model.modules())
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + auxiliary


@pytest.mark.parametrize("mlp", [TokenShift, Counting, edits.Experts])
def test_an_mlp_may_mix_or_count_tokens_also_where_few_have_a_label(mlp, monkeypatch):
    targets = IDX.roll(-1, 1).masked_fill(IDX % 3 > 0, -100)
    monkeypatch.setitem(MLPS, "mine", mlp)
    model = off_its_start(make_config(mlp="mine")).train()
    expected = loss_of_all(model, IDX, targets)
    torch.testing.assert_close(model(IDX, targets).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("branch", ["embedding", "mixer", "mlp"])
def test_dropout_is_on_every_branch_and_off_in_evaluation(branch):
    model = off_its_start(make_config(dropout=0.3, n_layer=1))
    with torch.no_grad():  # the other branches add nothing
        model.blocks[0].mixer.out_proj.weight.mul_(branch == "mixer")
        model.blocks[0].mlp.down.weight.mul_(branch == "mlp")
    assert torch.equal(model(IDX), model(IDX))
    model.train()
    model.dropout.train(branch == "embedding")
    assert not torch.equal(model(IDX), model(IDX))
