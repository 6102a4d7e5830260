"""The model against its definitions: gates, cosFormer, softmax, initialisation, refusals.

    python -m pytest tests/test_model.py
What every mixer promises is in test_contract.py, published layers are in test_oracles.py, and edits in test_edits.py.
"""

from configurator import UserError

import contextlib
import copy
import itertools
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import gate
import model
from gate import GATE_ACTIVATIONS, parse_gate
from model import DENOMINATOR_MIN, GLA, GPT, MIXERS, GPTConfig
from runs.probe import weights_of

T, C, H, D = 40, 32, 4, 8
every_mixer = pytest.mark.parametrize("name", MIXERS)
CLOSE = dict(rtol=1e-12, atol=1e-13)


def make_config(**keys):
    return GPTConfig(**(dict(n_layer=2, n_embd=C, n_head=H, block_size=T, vocab_size=50, state_size=8) | keys))


@torch.no_grad()
def make_model(dtype=torch.float64, **keys):
    torch.manual_seed(0)
    model = GPT(make_config(**keys)).to(dtype).eval()
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.1)
    return model


def make_mixer(name, gate="none", **keys):
    return make_model(attention=name, gate=gate, **keys).blocks[0].mixer


def random_x(length=T):
    return torch.randn(2, length, C, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def random_ids(*shape):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


# -- what a subclass inherits ------------------------------------------------------------------------------------------


def read(self, p, state, start):
    return p.v


@pytest.mark.parametrize("parent", [model.Softmax, model.CosFormer, GLA])
@pytest.mark.parametrize(
    "parts, has_weights",
    [
        ({"project": read, "normed": read}, True),
        ({"read": read}, False),
        ({"forward": read}, False),
        ({"read": read, "explicit_weights": read, "linear_in": ("key",)}, True),
    ],
    ids=["other parts", "read", "forward", "read with weights"],
)
def test_weights_and_linearity_are_inherited_until_the_readout_is_another(parent, parts, has_weights, helpers):
    child = type("Child", (parent,), parts)
    for cls in (child, type("Grandchild", (child,), {})):
        assert (cls.explicit_weights is not None) == has_weights
        inherited = () if {"read", "forward"} & parts.keys() else parent.linear_in
        assert cls.linear_in == parts.get("linear_in", inherited)
    if not has_weights:
        message = helpers.error_of(weights_of, child(make_config(), parse_gate("none")), random_x())
        assert message == "Child: its readout is its own, so explicit_weights must be, too"


# -- the gate ----------------------------------------------------------------------------------------------------------


def like(mixer, source):
    """mixer, with the parameters that it shares with source."""
    mixer.load_state_dict(source.state_dict(), strict=False)
    return mixer


@every_mixer
@pytest.mark.parametrize("granularity", gate.GRANULARITIES)
def test_a_gate_of_zero_weights_halves_the_readout(name, granularity):
    ungated, x = make_mixer(name), random_x()
    for activation, factor in (("sigmoid", 0.5), ("sigmoid2", 1.0), ("non_sparse", 0.75), ("silu", 0.0)):
        gated = like(make_mixer(name, granularity, gate_activation=activation), ungated)
        nn.init.zeros_(gated.gates["readout"].proj.weight)
        torch.testing.assert_close(gated(x), factor * ungated(x), **CLOSE)


@every_mixer
def test_a_bias_of_40_opens_the_gates(name):
    ungated, x = make_mixer(name), random_x()
    gates = "elementwise+elementwise@value+headwise@key+elementwise@query"
    gated = like(make_mixer(name, gates, gate_bias=0.0), ungated)
    for opened in gated.gates.values():
        nn.init.zeros_(opened.proj.weight)
        nn.init.constant_(opened.proj.bias, 40.0)
    torch.testing.assert_close(gated(x), ungated(x), **CLOSE)


@every_mixer
def test_a_branch_scale_is_a_factor_on_the_branch_and_a_half_is_where_a_sigmoid_starts(name):
    whole, x = make_mixer(name), random_x()
    torch.testing.assert_close(like(make_mixer(name, branch_scale=0.3), whole)(x), 0.3 * whole(x), **CLOSE)
    logits = []
    for keys in (dict(gate="elementwise"), dict(branch_scale=0.5)):
        torch.manual_seed(0)
        logits.append(GPT(make_config(attention=name, **keys))(random_ids(2, T)))
    assert torch.equal(*logits)


@pytest.mark.parametrize("init", ["normal", "pytorch"])
def test_out_init_scale_is_a_factor_on_the_start_of_the_mixers_output_projections_alone(init):
    starts = []
    for scale in (1.0, 0.3):
        torch.manual_seed(0)
        gpt = GPT(make_config(attention="gla", gate="elementwise", init=init, out_init_scale=scale))
        starts.append(dict(gpt.named_parameters()))
    for path, p in starts[1].items():
        assert torch.equal(p, (0.3 if path.endswith("mixer.out_proj.weight") else 1.0) * starts[0][path])


@pytest.mark.parametrize("name", ["softmax", "mamba2"])
@pytest.mark.parametrize("granularity", ["headwise", "shared", "scalar"])
def test_every_granularity_is_an_elementwise_gate_with_tied_rows(name, granularity):
    elementwise, x = like(make_mixer(name, "elementwise"), make_mixer(name)), random_x()
    tied = like(make_mixer(name, granularity), make_mixer(name))
    heads, width = elementwise.n_head, elementwise.value_width
    shape = {"headwise": (heads, 1, C), "shared": (1, width, C), "scalar": (1, 1, C)}[granularity]
    rows = tied.gates["readout"].proj.weight.view(shape)
    with torch.no_grad():
        elementwise.gates["readout"].proj.weight.copy_(rows.expand(heads, width, C).flatten(0, 1))
    torch.testing.assert_close(elementwise(x), tied(x), **CLOSE)


@every_mixer
@pytest.mark.parametrize("readout_norm", ["none", "published"])
def test_with_one_token_a_value_gate_is_a_readout_gate(name, readout_norm):
    """Where a norm follows the readout, the gate has to come before it, and norm_first=False is that order."""
    norm = MIXERS[name].published_norm if readout_norm == "published" else readout_norm
    on_value, x = make_mixer(name, "elementwise@value", readout_norm=readout_norm), random_x(1)
    on_readout = make_mixer(name, "elementwise", readout_norm=readout_norm, norm_first=norm != "rms")
    like(on_readout, on_value).gates["readout"].load_state_dict(on_value.gates["value"].state_dict())
    torch.testing.assert_close(on_readout(x), on_value(x), rtol=1e-10, atol=1e-12)


def test_a_low_rank_gate_is_a_product_and_a_static_gate_ignores_its_input():
    low_rank = make_mixer("gla", "elementwise", gate_rank=3).gates["readout"]
    assert low_rank.down.weight.shape == (3, C) and low_rank.proj.weight.shape == (C, 3)
    static, y = make_mixer("gla", "elementwise", gate_input="static").gates["readout"], torch.ones(2, T, H, D).double()
    assert torch.equal(static(y, random_x()), static(y, 2 * random_x()))
    torch.testing.assert_close(static(y, random_x())[0, 0].flatten(), static.static.sigmoid())


def test_activations_are_their_formulas_and_the_positive_ones_are_positive():
    y, g, slope = 1.7, torch.linspace(-4, 4, 33, dtype=torch.float64), torch.tensor([0.3]).double()
    sigmoid = 1 / (1 + torch.exp(-g))
    expected = {
        "sigmoid": y * sigmoid,
        "sigmoid2": y * 2 * sigmoid,
        "non_sparse": y * (1 + sigmoid) / 2,
        "silu": y * g * sigmoid,
        "gelu": y * g * (1 + torch.erf(g / math.sqrt(2))) / 2,
        "tanh": y * torch.tanh(g),
        "identity": y * g,
        "learned": y * g / (1 + torch.exp(-slope * g)),
        "add_silu": y + g * sigmoid,
        "add_identity": y + g,
    }
    assert expected.keys() == GATE_ACTIVATIONS.keys()
    for name, formula in expected.items():
        torch.testing.assert_close(GATE_ACTIVATIONS[name](y, g, slope), formula, **CLOSE)
        is_positive = bool((GATE_ACTIVATIONS[name](0.1, g, slope) > 0).all())
        assert is_positive == (name in gate.POSITIVE_ACTIVATIONS), name


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


def rms_norm(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


OTHER = dict(mlp="swiglu", mlp_width=40, tie_embeddings=False, norm_eps=0.1, rope_fraction=0.5, attention_softcap=2.0)


@pytest.mark.parametrize("keys", [{}, OTHER], ids=["published", "other keys"])
def test_the_softmax_gpt_is_its_definition(keys):
    model = make_model(attention="softmax", gate="headwise", n_kv_head=2, qk_norm=True, logit_softcap=3.0, **keys)
    eps, n = keys.get("norm_eps", 1e-5), round(D * keys.get("rope_fraction", 1))  # n: channels that turn
    idx = random_ids(2, T)
    x = model.wte.weight[idx]
    for block in model.blocks:
        h, mixer = rms_norm(x, block.norm_1.weight, eps), block.mixer
        q, k, v = (h @ mixer.qkv.weight.T).split([C, C // 2, C // 2], dim=-1)
        q, k, v = (y.view(2, T, -1, D) for y in (q, k, v))
        q, k = rms_norm(q, mixer.q_norm.weight, eps), rms_norm(k, mixer.k_norm.weight, eps)
        # RoPE as complex numbers: the pair (d, d + n/2) turns by t * 10000^(-2d/n)
        angle = torch.arange(T).double()[:, None] * 1e4 ** (-torch.arange(0, n, 2) / n).double()
        turn = torch.polar(torch.ones_like(angle), angle)
        turned = (torch.complex(*y[..., :n].chunk(2, -1)) * turn[:, None] for y in (q, k))
        q, k = (torch.cat([z.real, z.imag, y[..., n:]], -1) for z, y in zip(turned, (q, k), strict=True))
        k, v = (y.repeat_interleave(2, dim=2) for y in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D)
        scores = 2 * torch.tanh(scores / 2) if keys else scores
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        y = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
        y = y * (h @ mixer.gates["readout"].proj.weight.T).sigmoid()[..., None]
        x = x + y.flatten(2) @ mixer.out_proj.weight.T
        h, mlp = rms_norm(x, block.norm_2.weight, eps), block.mlp
        hidden = h @ mlp.up.weight.T
        hidden = F.silu(h @ mlp.glu.weight.T) * hidden if keys else F.gelu(hidden)
        x = x + hidden @ mlp.down.weight.T
    output = (model.head if keys else model.wte).weight
    logits = 3 * torch.tanh(rms_norm(x, model.norm.weight, eps) @ output.T / 3)
    torch.testing.assert_close(model(idx), logits, rtol=1e-10, atol=1e-10)
    loss = F.cross_entropy(logits.flatten(0, 1), idx.flatten())
    torch.testing.assert_close(model(idx, idx), loss, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gate", ["none", "elementwise"])
def test_swiglu_and_match_params_keep_the_number_of_parameters(gate):
    keys = dict(n_embd=48, mlp_ratio=4)
    plain = GPT(make_config(**keys))
    other = GPT(make_config(mlp="swiglu", gate=gate, match_params=True, **keys))
    assert other.n_params() == plain.n_params()
    untied = GPT(make_config(tie_embeddings=False, **keys))
    assert untied.n_params() == plain.n_params() + 50 * 48
    assert untied.flops_per_token() == plain.flops_per_token()  # a table that is read costs nothing


@pytest.mark.parametrize("mlp", ["gelu_tanh", "swiglu"])
def test_match_params_counts_the_biases_of_the_mlp(mlp):
    keys = dict(n_embd=16, mlp_ratio=8, mlp=mlp, norm="layer", bias=True)
    plain = GPT(make_config(**keys))
    gates = "elementwise+elementwise@value+elementwise@query+elementwise@key"
    matched = GPT(make_config(gate=gates, match_params=True, **keys))
    up = plain.blocks[0].mlp.up
    unit = (sum(p.numel() for p in plain.blocks[0].mlp.parameters()) - 16) / up.out_features  # all but down's bias
    assert 0 < abs(matched.n_params() - plain.n_params()) <= len(plain.blocks) * unit / 2


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(T - 3, 8), (2 * T + 3,), (T + 1, T)])
def test_past_block_size_softmax_sees_the_last_block_size_tokens(lengths):
    mixer, x = make_mixer("softmax"), random_x(3 * T)
    state, start, outputs = mixer.init_state(2, dtype=x.dtype), 0, []
    for length in (*lengths, *[1] * (3 * T - sum(lengths))):
        outputs.append(mixer(x[:, start : start + length], state, start))
        start += length
    outputs = torch.cat(outputs, dim=1)
    for t in (T - 1, T, T + 4, T + 5, 2 * T + 2, 2 * T + 3, 3 * T - 1):  # RoPE is relative: a window begins anywhere
        torch.testing.assert_close(outputs[:, t], mixer(x[:, t - T + 1 : t + 1])[:, -1], rtol=1e-9, atol=1e-9)


# -- dtypes and devices ------------------------------------------------------------------------------------------------

KEYS = [  # of every mixer: its parts, and those of others
    dict(gate="native+elementwise"),
    dict(gate="elementwise@value+headwise@key+elementwise@query", short_conv=3, n_groups=2, qk_norm=True),
    dict(gate="shared@value+elementwise@key+elementwise@query", gate_input="static", short_conv=0, n_kv_head=2),
    dict(gate="elementwise", readout_norm="rms", attention_softcap=2.0, rope_scaling="yarn", rope_factor=2.0),
]


@every_mixer
@pytest.mark.parametrize("keys", KEYS)
def test_what_reaches_the_recurrence_has_autocasts_dtype_and_decay_and_beta_are_float32(name, keys):
    """float32 would make the kernels slower; cosFormer's cosines, and what the recurrence sums, come later."""
    mixer = make_model(torch.float32, attention=name, **keys).blocks[0].mixer
    with torch.autocast("cpu", torch.bfloat16):
        projected = mixer.project(random_x().float(), None, 0)
        gated = mixer.gated_projection(random_x().float())
    for p in (projected, gated):
        if p is projected or name != "cosformer":
            assert {p.q.dtype, p.k.dtype, p.v.dtype} == {torch.bfloat16}
        assert all(x is None or x.dtype == torch.float32 for x in (p.log_decay, p.beta))


@every_mixer
@pytest.mark.parametrize("keys", KEYS[:3])
def test_gradients_are_the_same_inside_an_autocast_context_and_outside(name, keys):
    model, idx = make_model(torch.float32, attention=name, **keys), random_ids(2, T)
    parameters = list(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, idx)
        inside = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert all(map(torch.equal, inside, torch.autograd.grad(loss, parameters)))


class NoFloat64(TorchDispatchMode):
    """Raises where a float64 tensor comes to be on the meta device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            assert not isinstance(x, torch.Tensor) or not (x.is_meta and x.dtype == torch.float64), function
        return result


@every_mixer
@pytest.mark.parametrize("keys", KEYS[1::2])
def test_a_device_needs_no_float64(name, keys, monkeypatch):
    """MPS has none. The meta device stands for it, which computes nothing and has no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **keys: contextlib.nullcontext())
    config = make_config(attention=name, **keys)
    with torch.device("meta"):
        model, idx = GPT(config), torch.zeros(2, 9, dtype=torch.long)
    with NoFloat64():
        model.features(idx)[0].sum().backward()
        _, state = model.features(idx, model.init_state(2))
        model.features(idx[:, :1], state, 9)


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


def test_layers_start_with_weights_of_their_own():
    first, second = GPT(make_config(n_layer=2)).blocks
    assert not torch.equal(first.mlp.up.weight, second.mlp.up.weight)


@every_mixer
def test_parameters_start_as_the_table_says(name):
    torch.manual_seed(0)
    keys = dict(gate="native+elementwise", gate_bias=1.5, gate_activation="learned", n_embd=256, n_head=16)
    start = dict(GPT(make_config(attention=name, **keys)).named_parameters())
    mixer = "blocks.1.mixer."
    spread = {"wte": 0.02, mixer + "out_proj": 0.01, "blocks.0.mlp.down": 0.01, "blocks.0.mlp.up": 0.02}  # 1 / sqrt(4)
    if MIXERS[name].native_gate:
        spread[mixer + "gates.native.proj"] = 0.02
    for module, expected in spread.items():
        assert abs(start[f"{module}.weight"].std() - expected) < expected / 20
    assert not start[mixer + "gates.readout.proj.weight"].any() and start[mixer + "gates.readout.slope"] == 1
    assert (start[mixer + "gates.readout.proj.bias"] == 1.5).all()
    if name in ("mamba2", "gated_deltanet"):
        A, dt = start[mixer + "A_log"].exp(), F.softplus(start[mixer + "dt_bias"])
        assert A.min() >= {"mamba2": 1.0, "gated_deltanet": 0.01}[name] and A.max() <= 16 and 4 < A.mean() < 12
        assert dt.min() >= 0.00099 and dt.max() <= 0.101
        assert abs(start[mixer + "conv.weight"]).max() <= 0.5
    assert all((p == 1).all() for key, p in start.items() if "norm" in key)


def test_pytorchs_initialisation_is_that_of_its_modules():
    keys = dict(vocab_size=500, n_layer=1, n_embd=64, position="learned", block_size=300, gate="elementwise")
    model = GPT(make_config(init="pytorch", **keys))
    for embedding in (model.wte, model.wpe):
        assert abs(float(embedding.weight.detach().std()) - 1) < 0.02
    for linear in (model.blocks[0].mixer.qkv, model.blocks[0].mixer.out_proj, model.blocks[0].mlp.down):
        bound, weight = linear.in_features**-0.5, linear.weight.detach()
        assert 0.98 * bound < float(weight.abs().max()) <= bound
        assert abs(float(weight.std()) - bound / 3**0.5) < 0.02 * bound
    assert not model.blocks[0].mixer.gates["readout"].proj.weight.any()  # a gate starts as it always does


def test_decay_parameters_biases_and_norms_get_no_weight_decay():
    mixers = "mamba2,gla,gated_deltanet,softmax"
    model = GPT(make_config(attention=mixers, n_layer=4, gate="elementwise", gate_bias=0.0, qk_norm=True))
    groups = model.parameter_groups(0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    decayed, free = (dict(group["params"]) for group in groups)
    assert decayed.keys() | free.keys() == dict(model.named_parameters()).keys()
    assert {name.rpartition(".")[2] for name in decayed} == {"weight"}
    assert {name.rpartition(".")[2] for name in free} == {"weight", "bias", "dt_bias", "A_log", "D"}
    assert all(p.dim() == 1 for p in free.values()) and all(p.dim() > 1 for p in decayed.values())


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((C,), 0.1))


def test_a_parameter_without_a_rule_for_its_start_is_an_error_that_says_where_to_add_one(monkeypatch):
    class Block(model.Block):
        def __init__(self, *args):
            super().__init__(*args)
            self.ln_1, self.mine = nn.LayerNorm(C), LayerScale()

    monkeypatch.setattr(model, "Block", Block)
    with pytest.raises(UserError, match=r"blocks.0.mine.scale: no rule .* give LayerScale a method init_parameter"):
        GPT(make_config())
    monkeypatch.setattr(LayerScale, "init_parameter", lambda self, name, start, generator: None, raising=False)
    block = GPT(make_config()).blocks[0]
    assert (block.ln_1.weight == 1).all() and (block.mine.scale == 0.1).all()  # the rule leaves the constructor's


def test_gated_is_blagpts_name_and_patterns_repeat():
    config = make_config(attention="gated")
    assert (config.attention, config.gate) == ("softmax", "elementwise")
    layers = make_config(attention="gla,gla,softmax", gate="native,headwise", n_layer=5).layers()
    assert [name for name, _ in layers] == ["gla", "gla", "softmax", "gla", "gla"]
    assert [gate.native for _, gate in layers] == [True, False, True, False, True]


REFUSED = {
    "a mixer that isn't there": (dict(attention="sofmax"), "did you mean 'softmax'"),
    "a granularity that isn't there": (dict(gate="elemwise"), "did you mean 'elementwise'"),
    "a position that isn't there": (dict(gate="headwise@valeu"), "did you mean 'value'"),
    "none with something": (dict(gate="none+headwise"), "stands alone"),
    "one position twice": (dict(gate="headwise+elementwise"), "two gates at position 'readout'"),
    "native twice": (dict(gate="native+native"), "stands alone"),
    "an empty gate": (dict(gate=""), "granularity"),
    "heads after they are mixed": (dict(attention="kda", gate="headwise@output"), "of kda: .* has mixed the heads"),
    "a denominator that isn't there": (dict(gate="headwise@denominator"), "has no denominator"),
    "a wide denominator": (dict(attention="cosformer", gate="elementwise@denominator"), "one number per head"),
    "a signed key": (dict(attention="cosformer", gate="elementwise@key", gate_activation="silu"), "denominator neg"),
    "a query gate under a denominator": (dict(attention="cosformer", gate="headwise@query"), "has no effect"),
    "a scalar query gate under a norm": (dict(attention="gla", gate="scalar@query"), "has no effect"),
    "a headwise gate before a norm of heads": (dict(attention="gla", gate="headwise", norm_first=False), "no effect"),
    "... of a head a group": (dict(attention="mamba2", gate="headwise", norm_first=False, n_groups=8), "no effect"),
    "a scalar gate before mamba2's norm": (dict(attention="mamba2", gate="scalar", norm_first=False), "has no effect"),
    "an order of no account": (dict(attention="cosformer", gate="elementwise", norm_first=False), "commutes"),
    "an order without a norm": (dict(gate="elementwise", norm_first=False), "no layer has a norm"),
    "a denominator of signed weights": (dict(attention="gla", readout_norm="denominator"), "both signs"),
    "a second denominator": (dict(attention="softmax", readout_norm="denominator"), "sum to one"),
    "heads that don't divide": (dict(n_embd=30), "multiple of n_head"),
    "key heads that don't divide": (dict(n_kv_head=3), "must divide n_head"),
    "groups that don't divide": (dict(attention="mamba2", n_groups=3), "must divide mamba2's 8 heads"),
    "rotary pairs of an odd head": (dict(attention="mamba2,softmax", n_embd=12), "needs an even head_dim, not 3"),
    "an odd share of rotary channels": (dict(rope_fraction=0.4), "even rope_fraction"),
    "key heads of the delta rule that don't divide": (dict(delta_heads=6, delta_key_heads=4), "divide the 6 heads"),
    "biases beside a mixer without": (dict(attention="softmax,gla", bias=True), "gla has no biases; leave bias out"),
    "no layer": (dict(n_layer=0), "at least 1"),
    "a misspelled mixer that n_layer doesn't reach": (dict(attention="softmax,gla,sofmax"), "did you mean 'softmax'"),
    "a misspelled gate that n_layer doesn't reach": (dict(gate="none,none,elemwise"), "did you mean 'elementwise'"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_makes_no_sense_is_refused_in_one_line(keys, words):
    with pytest.raises(UserError, match=words) as error:
        make_config(**keys)
    assert "\n" not in str(error.value)
    make_config(attention="mamba2,cosformer", n_embd=12)  # a head may be odd where no layer has RoPE


class NormOverTheWidth(model.CosFormer):
    """A mixer of a user's, whose norm is over all heads at once."""

    def __init__(self, config, gate):
        C, shape = config.n_embd, (config.n_head, config.head_dim)
        model.Mixer.__init__(self, config, gate, query=shape, key=shape, value=shape, norm_groups=1)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.conv = model.make_conv(config, 3 * C)


NORMS = [dict(), dict(readout_norm="rms"), dict(readout_norm="rms", norm_first=False)]


@pytest.mark.parametrize("name", ["softmax", "cosformer", "gla", "mamba2", "gated_deltanet", "over the width"])
def test_gates_are_refused_as_without_effect_just_where_they_have_none(name, monkeypatch):
    """With the refusal switched off, other weights of the gate change the output, or do not: as has_no_effect says."""
    monkeypatch.setitem(MIXERS, "over the width", NormOverTheWidth)
    monkeypatch.setattr(model, "DENOMINATOR_MIN", 1e-30)
    says, x = gate.has_no_effect, random_x(12)
    monkeypatch.setattr(gate, "has_no_effect", lambda *args: False)
    places = itertools.product(("headwise", "scalar", "shared"), ("readout", "query", "key", "value"))
    for (granularity, position), gate_input, norm in itertools.product(places, ("token", "static"), NORMS):
        keys = dict(gate=f"{granularity}@{position}", gate_input=gate_input, n_groups=2, n_layer=1) | norm
        one = make_mixer(name, **keys)
        if one.norm is not None:
            one.norm.eps = 1e-30
        other = copy.deepcopy(one)
        with torch.no_grad():
            for p in other.gates.parameters():
                p.add_(torch.randn_like(p))
            changes_nothing = bool((one(x) - other(x)).abs().max() < 1e-6)
        assert changes_nothing == says(granularity, position, MIXERS[name], one.config), keys


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_the_size_of_a_state_is_known_without_its_memory():
    """A terabyte of keys and values."""
    model = make_model(block_size=2**30, position="none")
    assert model.state_bytes(64) == 2 * 2 * 64 * 2**30 * C * 4


MIXING = {  # of one layer at context T: a multiply-add is 2; a state is decayed (1), written (2) and read (2)
    "softmax": 2 * (2 * H * D) * (T + 1) / 2,
    "cosformer": 5 * H * (2 * D) * D,
    "gla": 5 * H * D * D,
    "mamba2": 5 * (2 * H) * 8 * D,
    **dict.fromkeys(("gated_deltanet", "deltanet", "kda"), 7 * H * D * D),  # read once more, under k
}


@every_mixer
@pytest.mark.parametrize("position", ["none", "learned"])
def test_flops_are_the_count_by_hand(name, position):
    model = GPT(make_config(attention=name, position=position, n_layer=1))
    looked_up = T * C if position == "learned" else 0
    assert model.flops_per_token() == 2 * (model.n_params() - looked_up) + MIXING[name]
    assert model.flops_per_token(10 * T) - model.flops_per_token() == (18 * T * H * D if name == "softmax" else 0)


# -- loss and dropout --------------------------------------------------------------------------------------------------


@every_mixer
@pytest.mark.parametrize("gate", ["none", "native+elementwise+headwise@value+elementwise@output"])
def test_the_last_layer_computes_labelled_tokens_only_and_loss_and_gradients_are_those_of_all(name, gate):
    model = make_model(attention=name, gate=gate)
    parameters = list(model.parameters())
    idx, targets = random_ids(2, 3, T)
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(2)) < 0.8] = -100
    targets[1] = -100
    sparse = model(idx, targets)
    full = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(sparse.double(), full, rtol=1e-6, atol=0)
    torch.testing.assert_close(model(idx, targets, reduction="sum"), sparse * (targets != -100).sum())
    gradients = torch.autograd.grad(sparse, parameters), torch.autograd.grad(full, parameters)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)
    model(idx, torch.full_like(targets, -100)).backward()  # a micro-step without any label
    assert all(p.grad is not None and not p.grad.any() for p in parameters)


@every_mixer
def test_a_prompt_of_no_tokens_gives_no_logits_and_leaves_the_state(name):
    model, idx = make_model(attention=name, **KEYS[1]), random_ids(2, 9)
    nothing = idx[:, :0]
    assert model(nothing).shape == (2, 0, 50)
    loss = model(nothing, nothing)
    loss.backward()
    assert loss == 0
    assert weights_of(model.blocks[0].mixer, random_x(0)).shape[2:] == (0, 0)
    with torch.no_grad():
        state, parts = model.init_state(2, dtype=torch.float64), []
        for start, end in ((0, 0), (0, 5), (5, 5), (5, 9)):
            x, state = model.features(idx[:, start:end], state, start)
            parts.append(x)
        torch.testing.assert_close(torch.cat(parts, dim=1), model.features(idx)[0])


@pytest.mark.parametrize("branch", ["embedding", "mixer", "mlp"])
def test_dropout_is_on_every_branch_and_off_in_evaluation(branch):
    model, idx = make_model(dropout=0.3, n_layer=1), random_ids(1, T)
    with torch.no_grad():  # the other branches add nothing
        model.blocks[0].mixer.out_proj.weight.mul_(branch == "mixer")
        model.blocks[0].mlp.down.weight.mul_(branch == "mlp")
    assert torch.equal(model(idx), model(idx))
    model.train()
    model.dropout.train(branch == "embedding")
    assert not torch.equal(model(idx), model(idx))
