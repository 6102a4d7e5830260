"""The model against its definitions: gates, cosFormer, softmax, initialisation, refusals, sampling.

    python -m pytest tests/test_model.py
What every mixer promises is in test_contract.py; published layers are in test_oracles.py.
"""

from configurator import UserError

import contextlib
import copy
import itertools
import math
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import gate
import model
from gate import GATE_ACTIVATIONS, GRANULARITIES, parse_gate
from model import DENOMINATOR_MIN, GLA, GPT, MIXERS, GPTConfig
from ops.sampling import draw
from runs.probe import weights_of

T, C, H, D = 40, 32, 4, 8
every_mixer = pytest.mark.parametrize("name", MIXERS)


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


# -- what a subclass inherits ------------------------------------------------------------------------------------------


def read(self, p, state, start):
    return p.v


class Own(GLA):
    read = read
    explicit_weights = model.Softmax.explicit_weights
    linear_in = ("value",)


EVERY = [*MIXERS.values(), Own]


@pytest.mark.parametrize("mixer", EVERY)
@pytest.mark.parametrize(
    "parts, has_weights",
    [
        ({}, True),
        ({"project": read, "normed": read, "init_state": read}, True),
        ({"read": read}, False),
        ({"forward": read}, False),
        ({"read": read, "explicit_weights": read}, True),
        ({"forward": read, "explicit_weights": read}, True),
    ],
    ids=["nothing", "other parts", "read", "forward", "read with weights", "forward with weights"],
)
def test_weights_are_inherited_until_the_readout_is_another(mixer, parts, has_weights, helpers):
    child = type("Child", (mixer,), parts)
    for cls in (child, type("Grandchild", (child,), {})):
        assert (cls.explicit_weights is not None) == has_weights
    if not has_weights:
        message = helpers.error_of(weights_of, child(make_config(), parse_gate("none")), random_x())
        assert message == "Child: its readout is its own, so explicit_weights must be, too"


def test_biases_are_refused_until_a_mixer_s_own_check_takes_them(monkeypatch):
    monkeypatch.setitem(MIXERS, "child", type("Child", (GLA,), {}))
    with pytest.raises(UserError, match="bias=True: child has no biases"):
        make_config(attention="child", bias=True)
    takes_all = classmethod(lambda cls, name, config: None)
    for parent, parts in ((GLA, {"check": takes_all}), (model.Softmax, {})):
        monkeypatch.setitem(MIXERS, "child", type("Child", (parent,), parts))
        assert make_config(attention="child", bias=True).bias


def test_a_mixer_whose_state_ends_is_called_by_its_name(monkeypatch, helpers):
    monkeypatch.setitem(MIXERS, "child", type("Child", (GLA,), {"past_block_size": "ends"}))
    message = helpers.error_of(make_model(attention="child").stream, torch.zeros(1, T, dtype=torch.long), 2)
    assert message.startswith(f"child: position {T + 1} is past block_size={T}, where its state ends")


@pytest.mark.parametrize("name", ["gla", "cosformer"])
def test_a_gate_has_no_effect_only_on_a_readout_that_is_known_to_be_linear(name, monkeypatch):
    mixer = MIXERS[name]
    for parts, is_refused in (({}, True), ({"read": read}, False), ({"read": read, "linear_in": ("query",)}, True)):
        monkeypatch.setitem(MIXERS, name, type("Child", (mixer,), parts))
        with pytest.raises(UserError, match="has no effect") if is_refused else contextlib.nullcontext():
            make_config(attention=name, gate="headwise@query")


# -- the gate ----------------------------------------------------------------------------------------------------------


def set_gate(mixer, position, weight=0.0, bias=0.0):
    with torch.no_grad():
        mixer.gates[position].proj.weight.fill_(weight)
        if mixer.gates[position].proj.bias is not None:
            mixer.gates[position].proj.bias.fill_(bias)


def copy_shared(mixer, source):
    mixer.load_state_dict(source.state_dict(), strict=False)
    return mixer


@every_mixer
@pytest.mark.parametrize("granularity", ["elementwise", "headwise", "shared", "scalar"])
def test_a_gate_of_zero_weights_halves_the_readout(name, granularity):
    ungated, x = make_mixer(name), random_x()
    for activation, factor in (("sigmoid", 0.5), ("sigmoid2", 1.0), ("non_sparse", 0.75), ("silu", 0.0)):
        gated = copy_shared(make_mixer(name, granularity, gate_activation=activation), ungated)
        set_gate(gated, "readout")
        torch.testing.assert_close(gated(x), factor * ungated(x), rtol=1e-12, atol=1e-14)


@every_mixer
@pytest.mark.parametrize("gate", ["none", "elementwise"])
def test_a_branch_scale_is_a_factor_on_the_branch_whole_or_token_by_token(name, gate):
    whole, x = make_mixer(name, gate), random_x()
    scaled = copy_shared(make_mixer(name, gate, branch_scale=0.3), whole)
    expected = 0.3 * whole(x)
    torch.testing.assert_close(scaled(x), expected, rtol=1e-12, atol=1e-14)
    state, outputs = scaled.init_state(2, dtype=x.dtype), []
    for t in range(T):
        outputs.append(scaled(x[:, t : t + 1], state, t))
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-9, atol=1e-11)


@every_mixer
def test_a_fixed_half_starts_as_the_sigmoid_gate_does_where_the_gate_comes_last(name):
    torch.manual_seed(0)
    gated = GPT(make_config(attention=name, gate="elementwise"))
    torch.manual_seed(0)
    half = GPT(make_config(attention=name, branch_scale=0.5))
    idx = torch.randint(50, (2, T))
    assert torch.equal(gated(idx), half(idx))


@every_mixer
@pytest.mark.parametrize("init", ["normal", "pytorch"])
def test_out_init_scale_is_a_factor_on_the_start_of_the_mixers_output_projections_alone(name, init):
    starts = []
    for scale in (1.0, 0.3):
        torch.manual_seed(0)
        model = GPT(make_config(attention=name, gate="elementwise", init=init, out_init_scale=scale))
        starts.append(dict(model.named_parameters()))
    for path, p in starts[1].items():
        assert torch.equal(p, (0.3 if path.endswith("mixer.out_proj.weight") else 1.0) * starts[0][path])


@every_mixer
@pytest.mark.parametrize(
    "gate", ["elementwise", "headwise", "elementwise@value", "elementwise@key", "elementwise@query"]
)
def test_a_bias_of_40_opens_the_gate(name, gate):
    ungated, x = make_mixer(name), random_x()
    gated = copy_shared(make_mixer(name, gate, gate_bias=0.0), ungated)
    (position,) = parse_gate(gate).positions
    set_gate(gated, position, bias=40.0)
    torch.testing.assert_close(gated(x), ungated(x), rtol=1e-12, atol=1e-13)


@every_mixer
@pytest.mark.parametrize("granularity", ["headwise", "shared", "scalar"])
def test_every_granularity_is_an_elementwise_gate_with_tied_rows(name, granularity):
    elementwise, x = copy_shared(make_mixer(name, "elementwise"), make_mixer(name)), random_x()
    tied = copy_shared(make_mixer(name, granularity), make_mixer(name))
    heads, width = elementwise.n_head, elementwise.value_width
    shape = {"headwise": (heads, 1, C), "shared": (1, width, C), "scalar": (1, 1, C)}[granularity]
    rows = tied.gates["readout"].proj.weight.view(shape)
    with torch.no_grad():
        elementwise.gates["readout"].proj.weight.copy_(rows.expand(heads, width, C).flatten(0, 1))
    torch.testing.assert_close(elementwise(x), tied(x), rtol=1e-12, atol=1e-14)


@every_mixer
@pytest.mark.parametrize("readout_norm", ["none", "published"])
def test_with_one_token_a_value_gate_is_a_readout_gate(name, readout_norm):
    """Where a norm follows the readout, the gate has to come before it, and norm_first=False is that order."""
    norm = MIXERS[name].published_norm if readout_norm == "published" else readout_norm
    keys = dict(readout_norm=readout_norm, norm_first=norm != "rms")
    on_value, x = make_mixer(name, "elementwise@value", readout_norm=readout_norm), random_x(1)
    on_readout = copy_shared(make_mixer(name, "elementwise", **keys), on_value)
    on_readout.gates["readout"].load_state_dict(on_value.gates["value"].state_dict())
    torch.testing.assert_close(on_readout(x), on_value(x), rtol=1e-10, atol=1e-12)


def test_a_low_rank_gate_is_a_product_and_a_static_gate_ignores_its_input():
    low_rank = make_mixer("gla", "elementwise", gate_rank=3).gates["readout"]
    assert low_rank.down.weight.shape == (3, C) and low_rank.proj.weight.shape == (C, 3)
    static, y = make_mixer("gla", "elementwise", gate_input="static").gates["readout"], torch.ones(2, T, H, D).double()
    assert torch.equal(static(y, random_x()), static(y, 2 * random_x()))
    torch.testing.assert_close(static(y, random_x())[0, 0].flatten(), static.static.sigmoid())


def test_key_and_value_gates_of_grouped_heads_have_the_width_of_those_heads():
    mixer = make_mixer("softmax", "elementwise@value+headwise@key+elementwise@query", n_kv_head=2)
    rows = {position: gate.proj.weight.shape[0] for position, gate in mixer.gates.items()}
    assert rows == {"value": 2 * D, "key": 2, "query": H * D}


@pytest.mark.parametrize("activation", GATE_ACTIVATIONS)
def test_activations_are_their_formulas(activation):
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
    torch.testing.assert_close(GATE_ACTIVATIONS[activation](y, g, slope), expected[activation], rtol=1e-12, atol=1e-12)


def test_the_learned_activation_starts_as_silu():
    y, x = torch.randn(2, T, H, D).double(), random_x()
    learned = make_mixer("gla", "elementwise", gate_activation="learned").gates["readout"]
    silu = make_mixer("gla", "elementwise", gate_activation="silu").gates["readout"]
    silu.proj.load_state_dict(learned.proj.state_dict())
    with torch.no_grad():
        learned.slope.fill_(1.0)
    torch.testing.assert_close(learned(y, x), silu(y, x))


# -- the definitions ---------------------------------------------------------------------------------------------------


def test_cosformer_is_the_published_formula():
    """Qin et al. 2022, equation 10, with M = T, as the matrix of weights; i and j count from 1."""
    mixer, x = make_mixer("cosformer"), random_x()
    q, k, v = ((x @ w.T).view(2, T, H, D) for w in mixer.qkv.weight.split(C))
    i = torch.arange(1, T + 1).double()
    cosine = torch.cos(math.pi / 2 * (i[:, None] - i[None, :]) / T).tril()
    weights = torch.einsum("bihd,bjhd->bhij", q.relu(), k.relu()) * cosine
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=DENOMINATOR_MIN)
    expected = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2) @ mixer.out_proj.weight.T
    torch.testing.assert_close(mixer(x), expected, rtol=1e-12, atol=1e-12)


def test_cosformer_refuses_a_position_past_its_m():
    with pytest.raises(UserError, match="past block_size=40"):
        make_model(attention="cosformer")(torch.zeros(1, T + 1, dtype=torch.long))


def rms_norm(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize(
    "keys", [dict(), dict(mlp="swiglu", mlp_width=40, tie_embeddings=False, norm_eps=0.1, rope_fraction=0.5)], ids=str
)
def test_the_softmax_gpt_is_its_definition(keys):
    model = make_model(attention="softmax", gate="headwise", n_kv_head=2, qk_norm=True, logit_softcap=3.0, **keys)
    eps, n = keys.get("norm_eps", 1e-5), round(D * keys.get("rope_fraction", 1))  # n: channels that turn
    idx = torch.randint(50, (2, T))
    x = model.wte.weight[idx]
    for block in model.blocks:
        h, mixer = rms_norm(x, block.norm_1.weight, eps), block.mixer
        q, k, v = (h @ mixer.qkv.weight.T).split([C, C // 2, C // 2], dim=-1)
        q, k, v = (y.view(2, T, -1, D) for y in (q, k, v))
        q, k = rms_norm(q, mixer.q_norm.weight, eps), rms_norm(k, mixer.k_norm.weight, eps)
        # RoPE as complex numbers: the pair (d, d + n/2) turns by t * 10000^(-2d/n)
        turn = torch.polar(
            torch.ones(T, n // 2).double(),
            torch.arange(T).double()[:, None] * 1e4 ** (-torch.arange(0, n, 2) / n).double(),
        )
        turned = (torch.complex(*y[..., :n].chunk(2, -1)) * turn[:, None] for y in (q, k))
        q, k = (torch.cat([z.real, z.imag, y[..., n:]], -1) for z, y in zip(turned, (q, k), strict=True))
        k, v = (y.repeat_interleave(2, dim=2) for y in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D)
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
    plain = GPT(make_config(**keys)).n_params()
    other = GPT(make_config(mlp="swiglu", gate=gate, match_params=True, **keys))
    assert other.n_params() == plain and other.blocks[0].mlp.glu.weight.shape == other.blocks[0].mlp.up.weight.shape
    untied = GPT(make_config(tie_embeddings=False, **keys))
    assert untied.n_params() == plain + 50 * 48
    assert untied.flops_per_token() == GPT(make_config(**keys)).flops_per_token()  # a table that is read costs nothing


@pytest.mark.parametrize("mlp", ["gelu_tanh", "swiglu"])
def test_match_params_counts_the_biases_of_the_mlp(mlp):
    keys = dict(n_embd=16, mlp_ratio=8, mlp=mlp, norm="layer", bias=True)
    plain = GPT(make_config(**keys))
    gates = "elementwise+elementwise@value+elementwise@query+elementwise@key"
    matched = GPT(make_config(gate=gates, match_params=True, **keys))
    up = plain.blocks[0].mlp.up
    unit = (sum(p.numel() for p in plain.blocks[0].mlp.parameters()) - 16) / up.out_features  # all but down's bias
    assert 0 < abs(matched.n_params() - plain.n_params()) <= len(plain.blocks) * unit / 2


class Experts(model.MLP):
    """An edit: four MLPs, of which a token meets the likeliest one; its auxiliary loss evens out how many each gets."""

    n_experts = 4

    def __init__(self, config, hidden):
        nn.Module.__init__(self)
        self.router = nn.Linear(config.n_embd, self.n_experts, bias=False)
        self.experts = nn.ModuleList(model.MLP(config, hidden) for _ in range(self.n_experts))
        self.n_idle = sum(p.numel() for expert in self.experts[1:] for p in expert.parameters())

    def forward(self, x):
        share = self.router(x).softmax(-1)  # (B, T, experts)
        is_sent = F.one_hot(share.argmax(-1), self.n_experts).to(x.dtype)
        self.auxiliary_loss = 0.01 * self.n_experts * (share.mean((0, 1)) * is_sent.mean((0, 1))).sum()
        return sum((share * is_sent)[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


def test_a_mixture_of_experts_is_one_class_whose_auxiliary_loss_is_trained_on_and_not_evaluated(monkeypatch):
    monkeypatch.setitem(model.MLPS, "experts", Experts)
    gpt, idx = make_model(mlp="experts"), torch.randint(50, (2, T), generator=torch.Generator().manual_seed(1))
    targets = idx.masked_fill(idx % 2 == 0, -100)
    plain = gpt(idx, targets)
    torch.testing.assert_close(plain, F.cross_entropy(gpt(idx).flatten(0, 1), targets.flatten()))
    for reduction, n in (("mean", 1), ("sum", (targets != -100).sum())):
        loss = gpt.train()(idx, targets, reduction=reduction)
        auxiliary = sum(block.mlp.auxiliary_loss for block in gpt.blocks)
        assert auxiliary > 0.01
        torch.testing.assert_close(loss, n * (plain + auxiliary))
        routers = [block.mlp.router.weight for block in gpt.blocks]
        both, one, other = (
            torch.autograd.grad(y, routers, retain_graph=True) for y in (loss, n * plain, n * auxiliary)
        )
        for total, *parts in zip(both, one, other, strict=True):
            torch.testing.assert_close(total, sum(parts))
    expert = sum(p.numel() for p in gpt.blocks[0].mlp.experts[0].parameters())
    router = 4 * C
    dense = make_model().flops_per_token()
    assert gpt.n_params() == make_model().n_params() + 2 * (3 * expert + router)
    assert gpt.flops_per_token() == dense + 2 * 2 * router


def test_attention_softcap_is_its_formula():
    mixer, x = make_mixer("softmax", attention_softcap=2.0, position="none"), random_x()
    q, k, v = ((x @ w.T).view(2, T, H, D) for w in mixer.qkv.weight.split(C))
    scores = 2 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D) / 2)
    weights = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    expected = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2) @ mixer.out_proj.weight.T
    torch.testing.assert_close(mixer(x), expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_past_block_size_softmax_sees_the_last_block_size_tokens():
    mixer, x = make_mixer("softmax"), random_x(3 * T)
    state, outputs = mixer.init_state(2, dtype=torch.float64), []
    for start, end in ((0, T - 3), (T - 3, T + 5), *((t, t + 1) for t in range(T + 5, 3 * T))):
        y = mixer(x[:, start:end], state, start)
        outputs.append(y)
    outputs = torch.cat(outputs, dim=1)
    for t in (T, T + 4, T + 5, 3 * T - 1):  # RoPE is relative: a window may begin at any position
        torch.testing.assert_close(outputs[:, t], mixer(x[:, t - T + 1 : t + 1])[:, -1], rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("length", [2 * T + 3, 3 * T])
def test_a_prompt_longer_than_block_size_leaves_its_end_in_the_cache(length):
    mixer, x = make_mixer("softmax"), random_x(length + 1)
    state = mixer.init_state(2, dtype=torch.float64)
    y = mixer(x[:, :length], state)
    after = mixer(x[:, length:], state, length)
    torch.testing.assert_close(y[:, -1], mixer(x[:, length - T : length])[:, -1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(after[:, 0], mixer(x[:, -T:])[:, -1], rtol=1e-9, atol=1e-9)


class Window(model.Softmax):
    """An edit: each query sees its own key and the six before it."""

    def bias(self, i, j):
        return torch.where(i - j < 7, 0.0, -torch.inf).to(torch.float64)


class ALiBi(model.Softmax):
    """An edit: a score falls with the distance, at another slope in each head (Press et al. 2022)."""

    def bias(self, i, j):
        slopes = 2.0 ** (-8 / H * torch.arange(1, H + 1, dtype=torch.float64))
        return -slopes[:, None, None] * (i - j)


class WindowedALiBi(ALiBi):
    def bias(self, i, j):
        return super().bias(i, j).masked_fill(i - j >= 7, -torch.inf)


BIASES = {  # (head, query, key) -> what is added to the score, of the keys that the query sees
    Window: lambda h, i, j: 0.0 if i - j < 7 else -math.inf,
    ALiBi: lambda h, i, j: -(4.0 ** -(h + 1)) * (i - j),
    WindowedALiBi: lambda h, i, j: -(4.0 ** -(h + 1)) * (i - j) if i - j < 7 else -math.inf,
}


def with_bias(mixer, x, of):
    """(weights, output) of the definition, with a loop over heads, queries and keys; no positions."""
    q, k, v = ((x @ w.T).view(2, -1, H, D) for w in mixer.qkv.weight.split(C))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D)
    for h, i, j in itertools.product(range(H), range(x.shape[1]), range(x.shape[1])):
        scores[:, h, i, j] += of(h, i, j) if j <= i else -math.inf
    weights = scores.softmax(-1)
    return weights, torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2) @ mixer.out_proj.weight.T


@torch.no_grad()
@pytest.mark.parametrize("cap", [None, 1e6], ids=["fused", "written out"])
@pytest.mark.parametrize("edit", BIASES)
def test_a_bias_of_the_scores_is_right_in_training_prefill_decoding_and_the_weights(edit, cap, monkeypatch):
    monkeypatch.setitem(MIXERS, "edit", edit)
    mixer, x = make_mixer("edit", position="none", attention_softcap=cap), random_x()
    weights, expected = with_bias(mixer, x, BIASES[edit])
    close = dict(rtol=1e-9, atol=1e-9)  # a soft-cap of 1e6 moves a score by less
    torch.testing.assert_close(mixer(x), expected, **close)
    torch.testing.assert_close(weights_of(mixer, x), weights, **close)
    for pieces in ((9, 20, T - 29), (9, 1, 10, T - 20), (T - 12, *[1] * 12)):
        state, start, outputs = mixer.init_state(2, dtype=x.dtype), 0, []
        for n in pieces:
            y = mixer(x[:, start : start + n], state, start)
            outputs, start = [*outputs, y], start + n
        torch.testing.assert_close(torch.cat(outputs, dim=1), expected, **close)


@torch.no_grad()
def test_a_bias_is_right_past_block_size_where_the_ring_turns(monkeypatch):
    monkeypatch.setitem(MIXERS, "edit", WindowedALiBi)
    mixer, x = make_mixer("edit", position="none"), random_x(2 * T + 5)
    expected = with_bias(mixer, x, BIASES[WindowedALiBi])[1]
    state, outputs = mixer.init_state(2, dtype=x.dtype), []
    for start, end in ((0, T + 3), (T + 3, T + 9), *((t, t + 1) for t in range(T + 9, 2 * T + 5))):
        y = mixer(x[:, start:end], state, start)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-9, atol=1e-9)


@every_mixer
def test_decay_and_beta_are_float32_under_autocast(name):
    mixer = make_model(torch.float32, attention=name).blocks[0].mixer
    with torch.autocast("cpu", torch.bfloat16):
        p = mixer.project(random_x().float(), None, 0)
    assert all(x is None or x.dtype == torch.float32 for x in (p.log_decay, p.beta))


KEYS = [  # of every mixer: its parts, and those of others
    dict(gate="native+elementwise"),
    dict(gate="elementwise@value+headwise@key+elementwise@query", short_conv=3, n_groups=2, qk_norm=True),
    dict(gate="shared@value+elementwise@key+elementwise@query", gate_input="static", short_conv=0, n_kv_head=2),
    dict(gate="elementwise", readout_norm="rms", attention_softcap=2.0, rope_scaling="yarn", rope_factor=2.0),
]


@every_mixer
@pytest.mark.parametrize("keys", KEYS)
def test_what_reaches_the_recurrence_has_autocasts_dtype(name, keys):
    """float32 there would make the kernels slower; cosFormer's cosines, and what the recurrence sums, come later."""
    mixer = make_model(torch.float32, attention=name, **keys).blocks[0].mixer
    with torch.autocast("cpu", torch.bfloat16):
        projected = mixer.project(random_x().float(), None, 0)
        gated = mixer.gated_projection(random_x().float())
    for p in (projected, gated):
        if p is projected or name != "cosformer":
            assert {p.q.dtype, p.k.dtype, p.v.dtype} == {torch.bfloat16}
        assert all(x is None or x.dtype == torch.float32 for x in (p.log_decay, p.beta))


@every_mixer
@pytest.mark.parametrize("keys", KEYS)
def test_gradients_are_the_same_inside_an_autocast_context_and_outside(name, keys):
    model = make_model(torch.float32, attention=name, **keys)
    idx = torch.randint(50, (2, T), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, idx)
        inside = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    for (about, _), x, expected in zip(
        model.named_parameters(), inside, torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        assert torch.equal(x, expected), about


@every_mixer
@pytest.mark.parametrize("keys", KEYS)
def test_a_prompt_of_no_tokens_gives_no_logits_and_leaves_the_state(name, keys):
    model, idx = make_model(attention=name, **keys), torch.randint(50, (2, 9))
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


class NoFloat64On(TorchDispatchMode):
    """Raises where a float64 tensor comes to be on that device."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            assert not isinstance(x, torch.Tensor) or (x.device.type, x.dtype) != (self.device, torch.float64), function
        return result


@every_mixer
@pytest.mark.parametrize("keys", KEYS)
def test_a_device_needs_no_float64(name, keys, monkeypatch):
    """MPS has none. The meta device stands for it, which computes nothing and has no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **keys: contextlib.nullcontext())
    config = make_config(attention=name, **keys)
    with torch.device("meta"):
        model, idx = GPT(config), torch.zeros(2, 9, dtype=torch.long)
    with NoFloat64On("meta"):
        model.features(idx)[0].sum().backward()
        _, state = model.features(idx, model.init_state(2))
        model.features(idx[:, :1], state, 9)


def test_each_mixer_knows_which_layer_it_is():
    model = GPT(make_config(attention="gla,softmax", n_layer=3))
    assert [block.mixer.layer for block in model.blocks] == [0, 1, 2]


# -- construction ------------------------------------------------------------------------------------------------------


@every_mixer
@pytest.mark.parametrize("gate", ["elementwise", "native+headwise@value"])
def test_arms_of_one_seed_share_the_weights_they_have_in_common(name, gate):
    models = []
    for arm in ("none", gate):
        torch.manual_seed(7)
        models.append(GPT(make_config(attention=name, gate=arm)).state_dict())
    without, with_gate = models
    assert set(without) < set(with_gate)
    assert all(torch.equal(without[key], with_gate[key]) for key in without)
    torch.manual_seed(8)
    assert not torch.equal(GPT(make_config(attention=name)).state_dict()["wte.weight"], without["wte.weight"])


def test_layers_start_with_weights_of_their_own():
    first, second = GPT(make_config(n_layer=2)).blocks
    assert not torch.equal(first.mlp.up.weight, second.mlp.up.weight)


@every_mixer
def test_parameters_start_as_the_table_says(name):
    torch.manual_seed(0)
    model = GPT(make_config(attention=name, gate="native+elementwise", n_embd=256, n_head=16, gate_bias=1.5))
    start = dict(model.named_parameters())
    mixer = "blocks.1.mixer."
    assert abs(start["wte.weight"].std() - 0.02) < 1e-3
    assert abs(start[mixer + "out_proj.weight"].std() - 0.02 / 2) < 5e-4  # two layers: 1 / sqrt(2 * 2)
    assert abs(start["blocks.0.mlp.down.weight"].std() - 0.02 / 2) < 5e-4
    assert abs(start["blocks.0.mlp.up.weight"].std() - 0.02) < 1e-3
    assert not start[mixer + "gates.readout.proj.weight"].any()
    assert (start[mixer + "gates.readout.proj.bias"] == 1.5).all()
    if MIXERS[name].native_gate:
        assert abs(start[mixer + "gates.native.proj.weight"].std() - 0.02) < 1e-3
    if name in ("mamba2", "gated_deltanet"):
        A, dt = start[mixer + "A_log"].exp(), F.softplus(start[mixer + "dt_bias"])
        assert A.min() >= {"mamba2": 1.0, "gated_deltanet": 0.01}[name] and A.max() <= 16 and 4 < A.mean() < 12
        assert dt.min() >= 0.00099 and dt.max() <= 0.101
        assert abs(start[mixer + "conv.weight"]).max() <= 0.5
    assert all((p == 1).all() for key, p in start.items() if "norm" in key)


def test_decay_parameters_biases_and_norms_get_no_weight_decay():
    model = GPT(
        make_config(
            attention="mamba2,gla,gated_deltanet,softmax", n_layer=4, gate="elementwise", gate_bias=0.0, qk_norm=True
        )
    )
    decayed, free = ([p for _, p in group["params"]] for group in model.parameter_groups(0.1))
    names = {id(p): name.rpartition(".")[2] for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed} == {"weight"}
    assert {names[id(p)] for p in free} == {"weight", "bias", "dt_bias", "A_log", "D"}
    assert all(p.dim() == 1 for p in free) and len(decayed) + len(free) == len(list(model.parameters()))


class LayerScale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        return self.scale * x


class EditedBlock(model.Block):
    """What people do to a block: another norm under another name, and a parameter of their own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ln_1, self.layer_scale = nn.LayerNorm(C), LayerScale(C)


def test_a_parameter_starts_by_its_module_and_not_by_its_name(monkeypatch):
    monkeypatch.setattr(model, "Block", EditedBlock)
    monkeypatch.setattr(LayerScale, "init_parameter", lambda self, name, start, generator: None, raising=False)
    block = GPT(make_config()).blocks[0]
    assert (block.ln_1.weight == 1).all() and (block.ln_1.bias == 0).all()
    assert (block.layer_scale.scale == 0.1).all()  # as its constructor left it


def test_a_parameter_without_a_rule_for_its_start_is_an_error_that_says_where_to_add_one(monkeypatch):
    monkeypatch.setattr(model, "Block", EditedBlock)
    with pytest.raises(UserError, match=r"blocks.0.layer_scale.scale: no rule .* give LayerScale a method init_param"):
        GPT(make_config())


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
    "heads after they are mixed": (dict(gate="headwise@output"), "has mixed the heads"),
    "a denominator that isn't there": (dict(gate="headwise@denominator"), "has no denominator"),
    "a wide denominator": (dict(attention="cosformer", gate="elementwise@denominator"), "one number per head"),
    "a query gate under a denominator": (dict(attention="cosformer", gate="headwise@query"), "has no effect"),
    "a scalar query gate under a norm": (dict(attention="gla", gate="scalar@query"), "has no effect"),
    "a headwise gate before a norm of heads": (dict(attention="gla", gate="headwise", norm_first=False), "no effect"),
    "a scalar gate before mamba2's norm": (dict(attention="mamba2", gate="scalar", norm_first=False), "has no effect"),
    "an order of no account": (dict(attention="cosformer", gate="elementwise", norm_first=False), "commutes"),
    "an order without a norm": (dict(gate="elementwise", norm_first=False), "no layer has a norm"),
    "a denominator of signed weights": (dict(attention="gla", readout_norm="denominator"), "both signs"),
    "a second denominator": (dict(attention="softmax", readout_norm="denominator"), "sum to one"),
    "heads that don't divide": (dict(n_embd=30), "multiple of n_head"),
    "key heads that don't divide": (dict(n_kv_head=3), "must divide n_head"),
    "groups that don't divide": (dict(attention="mamba2", n_groups=3), "must divide mamba2's 8 heads"),
    "rotary pairs of an odd head": (dict(n_embd=12), "even head_dim"),
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


class NormOverTheWidth(model.CosFormer):
    """A mixer of a user's, whose norm is over all heads at once."""

    def __init__(self, config, gate):
        C, shape = config.n_embd, (config.n_head, config.head_dim)
        model.Mixer.__init__(self, config, gate, query=shape, key=shape, value=shape, norm_groups=1)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.conv = model.make_conv(config, 3 * C)


@pytest.mark.parametrize("mixer", [*MIXERS.values(), NormOverTheWidth])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("norm", [dict(), dict(readout_norm="rms"), dict(readout_norm="rms", norm_first=False)])
def test_gates_are_refused_as_without_effect_just_where_they_have_none(mixer, granularity, norm, monkeypatch):
    """With the refusal switched off, other weights of the gate change the output, or do not: as has_no_effect says."""
    monkeypatch.setitem(MIXERS, "mixer", mixer)
    monkeypatch.setattr(model, "DENOMINATOR_MIN", 1e-30)
    for position, gate_input in itertools.product(("readout", "query", "key", "value"), ("token", "static")):
        keys = dict(attention="mixer", gate=f"{granularity}@{position}", gate_input=gate_input, n_groups=2) | norm
        with monkeypatch.context() as patched:
            patched.setattr(gate, "has_no_effect", lambda *args: False)
            one, x = make_model(**keys).blocks[0].mixer, random_x()
        if one.norm is not None:
            one.norm.eps = 1e-30
        other = copy.deepcopy(one)
        with torch.no_grad():
            for p in other.gates.parameters():
                p.add_(torch.randn_like(p))
        changes_nothing = (one(x) - other(x)).abs().max() < 1e-6
        assert changes_nothing == gate.has_no_effect(granularity, position, mixer, one.config), (position, gate_input)


def test_a_head_may_be_odd_where_no_layer_has_rope():
    make_config(attention="mamba2,cosformer", n_embd=12)
    with pytest.raises(UserError, match="needs an even head_dim, not 3"):
        make_config(attention="mamba2,softmax", n_embd=12)


def test_a_head_a_group_makes_mamba2s_norm_one_of_heads():
    with pytest.raises(UserError, match="has no effect"):
        make_config(attention="mamba2", gate="headwise", norm_first=False, n_groups=8)


@pytest.mark.parametrize("name", MIXERS)
def test_messages_name_the_mixer_as_the_user_writes_it(name):
    with pytest.raises(UserError, match=f" of {name}: the output projection"):
        make_config(attention=name, gate="headwise@output")


def test_the_size_of_a_state_is_known_without_its_memory():
    """A terabyte of keys and values."""
    model = make_model(block_size=2**30, position="none")
    assert model.state_bytes(64) == 2 * 2 * 64 * 2**30 * C * 4


@pytest.mark.parametrize("gate", ["elementwise@key", "elementwise@query", "headwise@denominator"])
def test_what_can_turn_a_denominator_negative_is_refused(gate):
    """It would be clamped at 1e-6, and the readout come out millions of times the values it is a mean of."""
    x, largest = random_x(), {}
    for activation in GATE_ACTIVATIONS:
        try:
            mixer = make_mixer("cosformer", gate, gate_activation=activation)
        except UserError:
            continue
        largest[activation] = mixer(x).abs().max().item()
    sound = largest.pop("sigmoid")  # about 1
    assert {activation: y for activation, y in largest.items() if y > 100 * sound} == {}


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("gla", "headwise@value"),
        ("gla", "headwise@key"),
        ("gated_deltanet", "headwise@value"),
        ("mamba2", "scalar@value"),
        ("cosformer", "headwise@key"),
    ],
)
def test_a_static_gate_that_the_norm_divides_out_is_refused(name, gate):
    """One constant for all tokens: on v or k it is a factor of the readout, which a norm of the readout undoes."""
    with pytest.raises(UserError, match="has no effect"):
        make_config(attention=name, gate=gate, gate_input="static")


@every_mixer
def test_flops_count_each_matrix_once_and_the_mixing(name):
    model = GPT(make_config(attention=name))
    assert 2 * model.n_params() < model.flops_per_token() < 2 * model.n_params() + 1e6
    longer = model.flops_per_token(10 * T) - model.flops_per_token(T)
    assert longer > 0 if name == "softmax" else longer == 0


MIXING = {  # of one layer at context T: a multiply-add is 2; a state is decayed (1), written (2) and read (2)
    "softmax": 2 * (2 * H * D) * (T + 1) / 2,
    "cosformer": 5 * H * (2 * D) * D,
    "gla": 5 * H * D * D,
    "mamba2": 5 * (2 * H) * 8 * D,
    "gated_deltanet": 7 * H * D * D,  # read once more, under k
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("position", ["none", "learned"])
def test_flops_are_the_count_by_hand(name, position):
    model = GPT(make_config(attention=name, position=position, n_layer=1))
    looked_up = T * C if position == "learned" else 0
    assert model.flops_per_token() == 2 * (model.n_params() - looked_up) + MIXING[name]


# -- loss and sampling -------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_the_labels():
    model, idx = make_model(), torch.randint(50, (2, T))
    targets = torch.randint(50, (2, T))
    targets[0, : T // 2] = -100
    expected = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(model(idx, targets), expected)
    torch.testing.assert_close(model(idx, targets, reduction="sum"), expected * (targets != -100).sum())


@every_mixer
@pytest.mark.parametrize("gate", ["none", "native+elementwise", "headwise@value+elementwise@output"])
def test_the_last_layer_computes_labelled_tokens_only_and_loss_and_gradients_are_those_of_all(name, gate):
    model = make_model(attention=name, gate=gate)
    idx, targets = torch.randint(50, (2, 3, T), generator=torch.Generator().manual_seed(1))
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(2)) < 0.8] = -100
    targets[1] = -100
    sparse = model(idx, targets)
    gradients = torch.autograd.grad(sparse, list(model.parameters()))
    full = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(sparse.double(), full, rtol=1e-6, atol=0)
    for found, expected in zip(gradients, torch.autograd.grad(full, list(model.parameters())), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    model(idx, torch.full_like(targets, -100)).backward()  # a micro-step without any label
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@every_mixer
def test_greedy_with_the_cache_is_greedy_without(name):
    model, idx = make_model(attention=name), torch.randint(50, (3, 5))
    expected = idx
    for _ in range(20):
        expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(model.generate(idx, 20, temperature=0), expected)
    assert torch.equal(model.generate(idx, 20, temperature=0.7, top_k=1), expected)
    assert torch.equal(model.generate(idx, 20, top_p=1e-6), expected)


def test_ids_that_are_padding_or_unknown_to_the_tokenizer_are_never_drawn():
    model = make_model(vocab_size=50, pad_vocab_to=64)
    with torch.no_grad():
        model.wte.weight[45:] *= 30  # what would be likeliest
    assert model.wte.weight.shape[0] == 64 and model(torch.zeros(1, 3, dtype=torch.long)).shape[-1] == 50
    assert model.generate(torch.zeros(4, 1, dtype=torch.long), 30).max() < 50
    assert model.generate(torch.zeros(4, 1, dtype=torch.long), 30, n_tokens=45).max() < 45


def test_top_p_keeps_the_fewest_ids_that_reach_it():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(2000, -1)
    assert set(draw(logits, 1.0, None, 0.79).flatten().tolist()) == {0, 1}
    assert set(draw(logits, 1.0, None, 0.81).flatten().tolist()) == {0, 1, 2}
    equal = torch.zeros(2000, 4)  # two of four reach one half exactly
    assert len(set(draw(equal, 1.0, None, 0.5).flatten().tolist())) == 2
    assert set(draw(logits, 1.0, 3, None).flatten().tolist()) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature):
    n_draws, logits = 20_000, torch.tensor([0.0, 1.0, 2.0])
    torch.manual_seed(0)
    share = draw(logits.expand(n_draws, -1), temperature, None, None).flatten().bincount(minlength=3) / n_draws
    torch.testing.assert_close(share, (logits / temperature).softmax(0), rtol=0, atol=0.02)  # five standard errors


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_and_not_a_token(broken):
    model = make_model()
    with torch.no_grad():
        model.norm.weight[0] = broken
    with pytest.raises(UserError, match="not finite"):
        model.generate(torch.zeros(1, 1, dtype=torch.long), 1)


@every_mixer
def test_past_block_size_each_mixer_does_what_it_can(name):
    model, idx = make_model(attention=name), torch.zeros(1, 3, dtype=torch.long)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if name == "cosformer":
            with pytest.raises(UserError, match="past block_size"):
                model.generate(idx, 2 * T)
        else:
            assert model.generate(idx, 2 * T).shape == (1, 3 + 2 * T)
    assert bool(said) == (name == "softmax")


def test_learned_positions_end_with_block_size():
    model = make_model(position="learned")
    with pytest.raises(UserError, match="no embedding past block_size=40"):
        model.generate(torch.zeros(1, 3, dtype=torch.long), T)


@pytest.mark.parametrize("branch", ["embedding", "mixer", "mlp"])
def test_dropout_is_on_every_branch_and_off_in_evaluation(branch):
    model, idx = make_model(dropout=0.3, n_layer=1), torch.randint(50, (1, T))
    with torch.no_grad():  # what is not asked about adds nothing
        model.blocks[0].mixer.out_proj.weight.mul_(branch == "mixer")
        model.blocks[0].mlp.down.weight.mul_(branch == "mlp")
    assert torch.equal(model(idx), model(idx))
    model.train()
    model.dropout.train(branch == "embedding")
    assert not torch.equal(model(idx), model(idx))
