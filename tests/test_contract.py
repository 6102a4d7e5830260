"""What every mixer promises, with every gate that it takes: the mixers come from the dict in model.py.

With MIXER=gla (make check MIXER=gla) it is one mixer, and conftest.py prints the broken promise in the first line.
"""

import functools
import itertools
import os

import pytest
import torch
import torch.nn.functional as F
from small_models import logits_of_pieces, off_its_start, seen_of

from configurator import UserError, check_choice
from gate import GATE_ACTIVATIONS
from model import MIXERS, GPTConfig, Softmax
from ops import IGNORE
from runs.probe import weights_of

T, VOCAB, CHUNK = 44, 50, 16  # heads of up to 16 channels have chunks of 16
GATES = [
    "none", "native", "elementwise", "headwise", "shared", "scalar", "elementwise@value", "headwise@key",
    "elementwise@query", "elementwise@output", "headwise@denominator", "elementwise@readout+headwise@value",
    "native+elementwise",
]  # fmt: skip
OPTIONS = {  # keys beside the gate string: each is tried with three mixers, the gated ones with an activation each
    "a gate of rank 3": dict(gate="elementwise", gate_rank=3, gate_bias=0.5),
    "a static gate": dict(gate="elementwise", gate_input="static"),
    "norm after the gate": dict(gate="elementwise", norm_first=False),
    "an rms norm": dict(gate="headwise", readout_norm="rms"),
    "no norm": dict(gate="native+elementwise", readout_norm="none"),
    "a readout without weights": dict(gate="none", readout_activation="silu", branch_scale=0.3),
    "short convolutions": dict(gate="elementwise", short_conv=3, delta_key_heads=1, delta_value_dim=12),
    "no convolutions, no MLP": dict(gate="native", short_conv=0, mlp="none", native_bias=True),
    "matched parameters": dict(gate="elementwise", match_params=True, mlp="swiglu", tie_embeddings=False),
    "learned positions": dict(gate="none", position="learned"),
    "LayerNorm": dict(gate="elementwise", norm="layer"),
    "GPT-2": dict(gate="elementwise", norm="layer", bias=True, mlp="gelu_tanh", position="learned", match_params=True),
    "grouped heads": dict(
        gate="elementwise@key+elementwise@value", n_kv_head=2, n_groups=2, qk_norm=True,
        delta_heads=6, delta_key_heads=2, delta_key_dim=4, beta_max=2,
    ),
    "soft-caps": dict(gate="none", attention_softcap=3.0, logit_softcap=5.0, rope_fraction=0.5, tie_embeddings=False),
}  # fmt: skip
OF_SOFTMAX = {  # more keys, which softmax layers alone read
    "softpick, elementwise": dict(gate="elementwise", attention_weights="softpick"),
    "softpick, grouped heads": dict(attention_weights="softpick", position="none", n_kv_head=2, qk_norm=True),
    "a forget gate, elementwise": dict(gate="elementwise", forget_gate=True, position="none"),
    "a forget gate, other keys": dict(
        forget_gate=True, n_kv_head=2, qk_norm=True, sink="head", window="7,none", short_conv=3
    ),
    "OLMo-2, Qwen2 and SmolLM3": dict(
        post_norm=True, qk_norm=True, qk_norm_over="all", n_kv_head=2, qkv_bias=True, position="none,rope",
        gate="headwise",
    ),
}  # fmt: skip
THREE = ["softmax", "mamba2", "gated_deltanet"]


def make_config(**keys):
    return GPTConfig(**(dict(n_layer=2, n_head=4, n_embd=32, block_size=50, vocab_size=VOCAB, state_size=8) | keys))


def is_valid(**keys):
    try:
        return bool(make_config(**keys))
    except UserError:  # this mixer refuses this gate: test_model.py holds the table of refusals
        return False


def list_cases():
    mixer = os.environ.get("MIXER")
    if mixer:
        check_choice("MIXER", mixer, MIXERS)
    names = [mixer] if mixer else list(MIXERS)
    cases = {f"{name}, {gate}": dict(attention=name, gate=gate) for name in names for gate in GATES}
    activations = itertools.cycle(GATE_ACTIVATIONS)
    for name, (about, keys) in itertools.product([mixer] if mixer else THREE, OPTIONS.items()):
        activation = {} if keys["gate"] == "none" else {"gate_activation": next(activations)}
        cases[f"{name}, {about}"] = dict(attention=name) | keys | activation
    for name in names:
        if issubclass(MIXERS[name], Softmax):
            cases |= {f"{name}, {about}": dict(attention=name) | keys for about, keys in OF_SOFTMAX.items()}
            for kind, more in (("zero", {}), ("head", {"n_kv_head": 2}), ("token", {"attention_softcap": 3.0})):
                cases[f"{name}, sink {kind}"] = dict(attention=name, gate="none", sink=kind, window="7,none") | more
        if MIXERS[name].has_levels:
            cases[f"{name}, levels"] = dict(attention=name, gate="elementwise", levels="log_linear")
    if not mixer:
        cases["cosformer, merged levels"] = dict(attention="cosformer", gate="elementwise", levels="merged")
        qwen3_next = ",".join(["gated_deltanet"] * 3 + ["softmax"])
        cases["Qwen3-Next"] = dict(attention=qwen3_next, gate="native,native,native,elementwise", n_layer=4)
        cases["all mixers in one"] = dict(attention=",".join(names), gate="native,elementwise", n_layer=len(names))
    return {about: keys for about, keys in cases.items() if is_valid(**keys)}


CASES = list_cases()
every_case = pytest.mark.parametrize("about", CASES)
IDX = torch.randint(VOCAB, (2, T), generator=torch.Generator().manual_seed(1))


def make_model(about, dtype=torch.float64, **keys):
    return off_its_start(make_config(**CASES[about] | keys), dtype)


@functools.cache
@torch.no_grad()
def model_and_logits(about):
    """In float64, made once for all tests that only read it."""
    model = make_model(about)
    return model, model(IDX)


@every_case
@torch.no_grad()
def test_later_tokens_leave_earlier_logits_bit_equal(about):
    model = make_model(about, torch.float32)
    logits = model(IDX)
    for t in (0, CHUNK - 1, CHUNK, T - 2):
        changed = IDX.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % VOCAB
        others = model(changed)
        assert torch.equal(others[:, : t + 1], logits[:, : t + 1])
        assert not torch.equal(others[:, t + 1 :], logits[:, t + 1 :])


@every_case
@torch.no_grad()
def test_a_prefix_gives_a_prefix(about):
    model, logits = model_and_logits(about)
    for t in (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, T - 1):
        assert (model(IDX[:, :t]) - logits[:, :t]).abs().max() < 1e-10


@every_case
def test_prefill_then_steps_equals_the_full_forward(about):
    """Eight steps cross every convolution; the last row is a prefill in pieces."""
    model, expected = model_and_logits(about)
    steps = ([split, *[1] * min(8, T - split)] for split in (1, CHUNK - 1, CHUNK, T - 1))
    for lengths in (*steps, [3, CHUNK, 2, T - CHUNK - 5]):
        logits = logits_of_pieces(model, IDX, lengths)
        assert (logits - expected[:, : logits.shape[1]]).abs().max() < 1e-10


@every_case
def test_gradients_reach_every_parameter_and_are_finite(about):
    model = make_model(about, torch.float32).train()
    model(IDX[:, :-1], IDX[:, 1:]).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name


@every_case
@torch.no_grad()
def test_the_loss_is_the_same_whether_the_last_layer_computes_all_tokens_or_those_with_a_label(about):
    """The first on a GPU and compiled, the second on a CPU: so no step behind a mixer's `read` may mix tokens, and no
    MLP that says is_per_token, nor may such an MLP count them."""
    model = make_model(about).train()
    targets = IDX.roll(-1, 1).masked_fill(IDX % 3 > 0, IGNORE)
    expected = F.cross_entropy(model(IDX).flatten(0, 1), targets.flatten())
    expected = expected + sum(getattr(module, "auxiliary_loss", 0.0) for module in model.modules())
    torch.testing.assert_close(model(IDX, targets).double(), expected, rtol=1e-6, atol=0)


def of_graphs():
    """One case of each mixer: three of them in CI, and the one that make check asks for."""
    for about, keys in CASES.items():
        if about.endswith(", elementwise"):
            is_quick = keys["attention"] in THREE or "MIXER" in os.environ
            yield pytest.param(about, marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("about", list(of_graphs()))
def test_a_training_step_compiles_to_one_graph(about):
    targets = IDX[:, 1:].masked_fill(IDX[:, 1:] % 2 == 0, IGNORE)
    explained = torch._dynamo.explain(make_model(about, torch.float32, n_layer=1).train())(IDX[:, :-1], targets)
    torch._dynamo.reset()
    assert (explained.graph_count, explained.break_reasons) == (1, [])


@every_case
@torch.no_grad()
def test_state_bytes_are_those_of_the_cache(about):
    model = model_and_logits(about)[0]
    state = model.features(IDX, model.init_state(2, dtype=torch.float64))[1]
    assert 2 * model.state_bytes(2) == sum(tensor.nbytes for layer in state for tensor in layer.values())


@every_case
@torch.no_grad()
def test_explicit_weights_reproduce_the_readout(about):
    model = model_and_logits(about)[0]
    mixers = [block.mixer for block in model.blocks if block.mixer.explicit_weights is not None]
    if not mixers:
        pytest.skip("no mixer here has weights: they override `read` or `forward`, and have no `explicit_weights`")
    for mixer in mixers:
        x = torch.randn(2, T, 32, dtype=torch.float64)
        seen = seen_of(mixer, x)
        p = seen.projection
        if "denominator" in mixer.gates:
            continue  # the gate is in the weights, and comes behind `read`
        v = p.v.repeat_interleave(mixer.n_head // p.v.shape[2], dim=2)
        readout = torch.einsum("bhij,bjhd->bihd", weights_of(seen), v)
        expected = mixer.read(p, None, 0)
        if mixer.norm_kind == "denominator":
            expected = expected[..., :-1] / expected[..., -1:].clamp(min=1e-6)
        assert (readout - expected).abs().max() < 1e-10
