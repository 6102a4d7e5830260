"""What every mixer promises, with every gate that it takes, and every MLP: they come from the dicts in model.py.

With MIXER=gla (make check MIXER=gla) it is one mixer, with MLP=swiglu one MLP, and conftest.py prints the broken
promise in the first line. test_contract_catches.py has a wrong mixer or MLP for each promise.
"""

import functools
import itertools
import os

import pytest
import torch
import torch.nn.functional as F
from small_models import count_flops, logits_of_pieces, off_its_start, seen_of

from base.configurator import UserError, check_choice
from gate import GATE_ACTIVATIONS
from model import GPT, MIXERS, MLPS, GPTConfig, Softmax, check_documents
from ops import IGNORE
from runs.probe import weights_of

T, VOCAB, CHUNK = 44, 50, 16  # heads of up to 16 channels have chunks of 16
SHORT = 16  # a block_size that T goes past, more than twice
GATES = [
    "none", "native", "elementwise", "headwise", "shared", "scalar", "elementwise@value", "headwise@key",
    "elementwise@query", "elementwise@output", "headwise@denominator", "elementwise@readout+headwise@value",
    "native+elementwise",
]  # fmt: skip
OPTIONS = {  # keys beside the gate string: each is tried with three mixers, the gated ones with an activation each
    "a gate of rank 3": dict(gate="elementwise", gate_rank=3, gate_bias=0.5),
    "a gate of three channels": dict(gate="elementwise", gate_width=3),
    "a static gate": dict(gate="elementwise", gate_input="static"),
    "norm after the gate": dict(gate="elementwise", norm_first=False),
    "an rms norm": dict(gate="headwise", readout_norm="rms"),
    "no norm": dict(gate="native+elementwise", readout_norm="none"),
    "a scaled branch": dict(gate="none", branch_scale=0.3),
    "short convolutions": dict(gate="elementwise", short_conv=3, delta_sizes=[1, 4, 8, 12]),
    "no convolutions, no MLP": dict(gate="native", short_conv=0, mlp="none"),
    "matched parameters": dict(gate="elementwise", match_params=True, mlp="swiglu", tie_embeddings=False),
    "learned positions": dict(gate="none", position="learned"),
    "LayerNorm": dict(gate="elementwise", norm="layer"),
    "GPT-2": dict(gate="elementwise", norm="layer", bias=True, mlp="gelu_tanh", position="learned", match_params=True),
    "grouped heads": dict(
        gate="elementwise@key+elementwise@value", n_kv_head=2, qk_norm=True,
        delta_sizes=[2, 6, 4, 8], beta_max=2,
    ),
    "a soft-cap": dict(gate="none", attention="softcap", tie_embeddings=False),
}  # fmt: skip
OF_SOFTMAX = {  # more keys, which softmax layers alone read
    "softpick, elementwise": dict(gate="elementwise", attention="softpick"),
    "softpick, grouped heads": dict(attention="softpick", position="none", n_kv_head=2, qk_norm=True),
    "a forget gate, elementwise": dict(gate="elementwise", attention="fox", position="none"),
    "a forget gate, other keys": dict(
        attention="fox", n_kv_head=2, qk_norm=True, window="7,none", short_conv=3
    ),
    "Qwen2 and SmolLM3": dict(
        attention="qwen2", qk_norm=True, n_kv_head=2, position="none,rope", gate="headwise"
    ),
    "Qwen3-Next": dict(attention="qwen3_next", qk_norm=True, n_kv_head=2, gate="elementwise"),
}  # fmt: skip
THREE = ["softmax", "mamba2", "gated_deltanet"]
# of these options the state, or the readout, is another one
OF_READOUTS = (
    "short convolutions",
    "grouped heads",
    "levels",
    "a forget gate, elementwise",
    "Qwen2 and SmolLM3",
)
LARGEST_TOLERANCE = 1e-4
FLOPS_FACTOR = 20  # how far a count may be from what is declared, either way


def make_config(**keys):
    return GPTConfig(**(dict(n_layer=2, n_head=4, n_embd=32, block_size=50, vocab_size=VOCAB, state_size=8) | keys))


def is_valid(**keys):
    try:
        return bool(make_config(**keys))
    except UserError:  # this mixer refuses this gate: test_model.py holds the table of refusals
        return False


def list_cases():
    mixer, mlp = os.environ.get("MIXER"), os.environ.get("MLP")
    if mixer:
        check_choice("MIXER", mixer, MIXERS)
        make_config(attention=mixer)  # what it refuses without a gate is told: there would be no case to test
    if mlp:
        check_choice("MLP", mlp, [name for name, made in MLPS.items() if made is not None])
    names = [mixer] if mixer else THREE if mlp else list(MIXERS)
    gates = ["none", "elementwise"] if mlp and not mixer else GATES
    cases = {f"{name}, {gate}": dict(attention=name, gate=gate) for name in names for gate in gates}
    activations = itertools.cycle(GATE_ACTIVATIONS)
    for name, (about, keys) in itertools.product([mixer] if mixer else THREE, OPTIONS.items()):
        activation = {} if keys["gate"] == "none" else {"gate_activation": next(activations)}
        cases[f"{name}, {about}"] = dict(attention=name) | keys | activation
    for name in names:
        if issubclass(MIXERS[name], Softmax):
            if name == "softmax":
                cases |= {about: dict(attention=name) | keys for about, keys in OF_SOFTMAX.items()}
            cases[f"{name}, window"] = dict(attention=name, gate="none", n_kv_head=2, window="7,none")
        if MIXERS[name].has_levels:
            cases[f"{name}, levels"] = dict(attention=name, gate="elementwise", levels="log_linear")
    if not mixer and not mlp:
        cases["cosformer, merged levels"] = dict(attention="cosformer", gate="elementwise", levels="merged")
        qwen3_next = ",".join(["gated_deltanet"] * 3 + ["softmax"])
        cases["Qwen3-Next"] = dict(attention=qwen3_next, gate="native,native,native,elementwise", n_layer=4)
        cases["all mixers in one"] = dict(attention=",".join(names), gate="native,elementwise", n_layer=len(names))
    if mlp:
        cases = {about: keys | {"mlp": mlp} for about, keys in cases.items() if keys.get("mlp") != "none"}
    return {about: keys for about, keys in cases.items() if is_valid(**keys)}


def list_readouts():
    """The cases of one mixer without a gate, and those whose state or readout is another one."""
    found = []
    for about, keys in CASES.items():
        is_one_mixer = keys["attention"] in MIXERS
        is_ungated = keys.get("gate", "none") == "none"
        if is_one_mixer and keys.get("position") != "learned" and (is_ungated or about.endswith(OF_READOUTS)):
            found.append(about)
    return found


def one_case_of_each_mixer():
    first = {}
    for about, keys in CASES.items():
        if keys["attention"] in MIXERS:
            first.setdefault(keys["attention"], about)
    return list(first.values())


def one_case_of_each_mlp():
    first = {}
    for about, keys in CASES.items():
        mlp = make_config(**keys).mlp
        if MLPS[mlp] is not None:
            first.setdefault(mlp, about)
    return list(first.values())


CASES = list_cases()
every_case = pytest.mark.parametrize("about", CASES)
every_readout = pytest.mark.parametrize("about", list_readouts())
every_mixer = pytest.mark.parametrize("about", one_case_of_each_mixer())
every_mlp = pytest.mark.parametrize("about", one_case_of_each_mlp())
# of the mixers and of the MLPs
every_part = pytest.mark.parametrize("about", dict.fromkeys(one_case_of_each_mixer() + one_case_of_each_mlp()))
IDX = torch.randint(VOCAB, (2, T), generator=torch.Generator().manual_seed(1))


def make_model(about, dtype=torch.float64, **keys):
    return off_its_start(make_config(**CASES[about] | keys), dtype)


@functools.cache
@torch.no_grad()
def model_and_logits(about):
    """In float64, made once for all tests that only read it."""
    model = make_model(about)
    return model, model(IDX)


# -- Causality, prefixes, decoding -------------------------------------------------------------------------------------


@every_mlp
@torch.no_grad()
def test_an_mlp_works_on_each_token_alone(about):
    """Decoding keeps no state for it, and a batch may be split anywhere."""
    mlp, x = make_model(about).blocks[0].mlp, torch.randn(3, T, 32, dtype=torch.float64)
    whole = mlp(x)
    for t in (1, CHUNK, T - 1):
        pieces = torch.cat([mlp(x[:, :t]), mlp(x[:, t:])], dim=1)
        assert (pieces - whole).abs().max() < 1e-10, "a token's output depends on the tokens before it or behind it"
    rows = torch.cat([mlp(x[:1]), mlp(x[1:])])
    assert (rows - whole).abs().max() < 1e-10, "a token's output depends on the other rows of the batch"


def largest_change_by_later_tokens(model):
    """The largest change of an earlier logit, as a share of the largest logit. 0: they are equal to the bit."""
    logits, largest = model(IDX), 0.0
    for t in (0, CHUNK - 1, CHUNK, T - 2):
        changed = IDX.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % VOCAB
        others = model(changed)
        assert not torch.equal(others[:, t + 1 :], logits[:, t + 1 :])
        if not torch.equal(others[:, : t + 1], logits[:, : t + 1]):
            largest = max(largest, float((others[:, : t + 1] - logits[:, : t + 1]).abs().max()))
    return largest / float(logits.abs().max())


@every_case
@torch.no_grad()
def test_later_tokens_leave_earlier_logits_bit_equal(about):
    """A mixer or MLP with a `tolerance` may change them by that much in float32, and by rounding alone in float64."""
    model = make_model(about, torch.float32)
    parts = [block.mixer for block in model.blocks] + [block.mlp for block in model.blocks if block.mlp is not None]
    tolerance = max(part.tolerance for part in parts)
    assert tolerance <= LARGEST_TOLERANCE, f"tolerance={tolerance:g}: rounding is {LARGEST_TOLERANCE:g} at most"
    change = largest_change_by_later_tokens(model)
    assert change <= tolerance, (
        f"later tokens change earlier logits by {change:.0e} of the largest, and its tolerance is {tolerance:g}; "
        "if that is rounding, as an FFT's, declare a `tolerance`"
    )
    if tolerance:
        change = largest_change_by_later_tokens(make_model(about))
        assert change < 1e-12, f"in float64 later tokens change earlier logits by {change:.0e}: that is not rounding"


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


def refused(model, lengths):
    """The UserError that reading these pieces raises, or None."""
    try:
        logits_of_pieces(model, IDX, lengths)
    except UserError as error:
        return error


@every_readout
@torch.no_grad()
def test_past_block_size_a_state_does_what_past_block_size_declares(about):
    model = make_model(about, block_size=SHORT)
    declared = model.blocks[0].mixer.past_block_size
    assert declared in ("rolls", "ends", "goes on"), f"past_block_size={declared!r}: must be rolls, ends or goes on"
    if declared == "ends":
        why = "past_block_size='ends', but no UserError stops"
        assert not refused(model, [SHORT]), "it ends before block_size"
        assert refused(model, [SHORT + 1]), f"{why} a text longer than block_size"
        assert refused(model, [SHORT, 1]), f"{why} decoding past it"
        return
    error = refused(model, [SHORT, 1])
    assert error is None, f"past_block_size={declared!r}, but it is refused: {error}"
    at_once = logits_of_pieces(model, IDX, [T])
    steps = [[split, 1, 1, T - split - 2] for split in (SHORT - 1, SHORT, 2 * SHORT + 3)]
    for lengths in (*steps, [1, SHORT, T - SHORT - 1], [SHORT - 3, 7, 7, T - SHORT - 11]):
        difference = float((logits_of_pieces(model, IDX, lengths) - at_once).abs().max())
        assert difference < 1e-10, (
            f"past block_size={SHORT} it decodes other logits in pieces of {lengths} than at once, by {difference:.0e}"
        )
    if declared == "goes on":
        difference = float((model(IDX) - at_once).abs().max())
        assert difference < 1e-10, (
            "past_block_size='goes on', but past it decoded logits are not those of the whole text, "
            f"by {difference:.0e}; a state that forgets the oldest tokens 'rolls'"
        )
    else:
        model = make_model(about, block_size=SHORT, n_layer=1)
        changed = IDX.clone()
        changed[:, 0] = (changed[:, 0] + 1) % VOCAB
        change = logits_of_pieces(model, changed, [T]) - logits_of_pieces(model, IDX, [T])
        # a convolution before the window reaches further back than the window, by its width
        assert change[:, 2 * SHORT :].abs().max() < 1e-10, (
            "past_block_size='rolls', but a token that lies further back than two of them still changes the logits"
        )


@every_case
@torch.no_grad()
def test_the_loss_is_the_mean_over_the_tokens_that_have_a_label(about):
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
def test_a_state_has_the_tensors_and_the_bytes_of_init_state(about):
    """Also in memory: a view of a longer tensor would keep a whole prefill alive."""
    model = model_and_logits(about)[0]
    state, start = model.init_state(2, dtype=torch.float64), 0
    declared = [{name: tensor.shape for name, tensor in layer.items()} for layer in state]
    for length in (T - 1, 1):
        model.features(IDX[:, start : start + length], state, start)
        start += length
        found = [{name: tensor.shape for name, tensor in layer.items()} for layer in state]
        assert found == declared, "the state has other tensors than init_state, or of other shapes"
        for name, tensor in [item for layer in state for item in layer.items()]:
            held = tensor.untyped_storage().nbytes()
            assert held <= tensor.nbytes, (
                f"state[{name!r}] has {tensor.nbytes} bytes and keeps {held} alive: it is a view; store a .clone()"
            )
    assert 2 * model.state_bytes(2) == sum(tensor.nbytes for layer in state for tensor in layer.values())


@every_readout
@torch.no_grad()
def test_every_tensor_of_the_state_is_read(about):
    model = model_and_logits(about)[0]
    after = model.features(IDX[:, :-1], model.init_state(2, dtype=torch.float64))[1]

    def logits_with(layer=None, name=None):
        """The logits of the last token, where this tensor of the state has another value."""
        state = [{key: tensor.clone() for key, tensor in tensors.items()} for tensors in after]
        if name is not None:
            state[layer][name] += torch.rand_like(state[layer][name])
        return model.logits(model.features(IDX[:, -1:], state, T - 1)[0])

    logits = logits_with()
    for layer, name in [(layer, name) for layer, tensors in enumerate(after) for name in tensors]:
        is_read = not torch.equal(logits_with(layer, name), logits)
        assert is_read, f"state[{name!r}] is never used: with another value there the next logits are the same"


# -- Training ----------------------------------------------------------------------------------------------------------


def never_idle(model, names):
    """names, of parameters, without those that a sparse MLP may leave idle: at most n_idle numbers in each block."""
    parameters, kept = dict(model.named_parameters()), list(names)
    for block in model.blocks:
        if block.mlp is None:
            continue
        of_mlp = {id(p) for p in block.mlp.parameters()}
        in_mlp = [name for name in names if id(parameters[name]) in of_mlp]
        if sum(parameters[name].numel() for name in in_mlp) <= block.mlp.n_idle:
            kept = [name for name in kept if name not in in_mlp]
    return kept


@every_case
def test_gradients_reach_every_parameter_and_are_finite(about):
    """But for what a sparse MLP may leave idle: as many parameters as its n_idle."""
    model = make_model(about, torch.float32).train()
    model(IDX[:, :-1], IDX[:, 1:]).backward()
    unreached = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not never_idle(model, unreached), f"no gradient reaches {never_idle(model, unreached)[0]}"
    for name, p in model.named_parameters():
        assert p.grad is None or p.grad.isfinite().all(), f"the gradient of {name} is not finite"


@every_part
def test_a_start_depends_on_the_seed_and_the_name_alone(about):
    """An output layer of its own is drawn before the blocks: what they drew of torch's generator would be another."""
    states = []
    for tie_embeddings in (True, False):
        torch.manual_seed(0)
        states.append(GPT(make_config(**CASES[about] | {"tie_embeddings": tie_embeddings})).state_dict())
    for name, start in states[0].items():
        assert start.isfinite().all(), f"{name} starts at {float(start[~start.isfinite()][0])}"
        assert torch.equal(start, states[1][name]), (
            f"{name} starts elsewhere if the model has one parameter more: draw it in init_parameter, of its generator"
        )


@every_part
@torch.no_grad()
def test_it_computes_in_the_dtype_of_its_model_and_under_autocast(about):
    model = make_model(about, torch.float32)
    loss = model(IDX[:, :-1], IDX[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(IDX[:, :-1], IDX[:, 1:])
    assert abs(rounded - loss) < 0.1, f"the loss is {loss:.3f} in float32 and {rounded:.3f} under autocast to bfloat16"

    def compare(module, args, output):
        assert output.dtype == args[0].dtype, f"{type(module).__name__} makes {output.dtype} of {args[0].dtype}"

    for block in model.blocks:
        for module in (block.mixer, block.mlp):
            if module is not None:
                module.register_forward_hook(compare)
    for dtype in (torch.float64, torch.bfloat16):
        model.to(dtype)(IDX)


# -- Packed documents --------------------------------------------------------------------------------------------------

# lengths of documents in two rows of T: borders at a chunk's edge, one token behind it and one before it; documents
# of one token, shorter than a convolution, longer than a chunk, and a row's last token as a document
PACKED = [[CHUNK, 1, 1, CHUNK - 1, 2, T - 2 * CHUNK - 3], [1, 3, CHUNK + 1, T - CHUNK - 6, 1]]


def documents_of(rows):
    """(row, the slice of its tokens) of each document of rows with documents of these lengths."""
    for row, lengths in enumerate(rows):
        ends = list(itertools.accumulate(lengths))
        for length, end in zip(lengths, ends, strict=True):
            yield row, slice(end - length, end)


def places_of(rows):
    """Their `document` (B, T)."""
    places = torch.zeros(len(rows), sum(rows[0]), dtype=torch.long)
    for row, part in documents_of(rows):
        places[row, part] = part.start
    return places


def packs(model):
    """Skips a model whose mixers cannot keep documents apart, and says why."""
    try:
        check_documents(model.config)
    except UserError as error:
        pytest.skip(str(error))


def numbers_of(model, is_packed):
    """{what: numbers} of PACKED: logits, losses and the gradients of all parameters, packed or each document alone."""
    if is_packed:
        logits = model(IDX, document=places_of(PACKED)).flatten(0, 1)
    else:
        logits = torch.cat([model(IDX[row : row + 1, part])[0] for row, part in documents_of(PACKED)])
    targets = IDX.roll(-1, 1).masked_fill(IDX % 5 == 0, IGNORE).flatten()
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE)
    weights = torch.linspace(0.5, 1.5, len(losses), dtype=losses.dtype)  # no two labels count alike
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad((losses * weights).sum(), parameters, allow_unused=True)
    of_gradients = {f"the gradient of {name}": x for name, x in zip(names, gradients, strict=True) if x is not None}
    return {"logits": logits.detach(), "losses": losses.detach()} | of_gradients


def errors_of(numbers, exact):
    """{what: the largest difference}, as a share of the largest number, or of 1."""
    assert numbers.keys() == exact.keys(), "packed and alone, gradients reach other parameters"
    return {
        what: float((numbers[what] - x).abs().nan_to_num(torch.inf).max() / x.abs().max().clamp(min=1.0))
        for what, x in exact.items()
    }


@every_case
def test_packed_documents_have_the_logits_losses_and_gradients_of_each_alone(about):
    """In float64 up to 1e-12; in float32 up to 1e-5, or three times as far from float64 as documents alone are."""
    # a start with less noise: some gates make float32 worthless otherwise
    model = off_its_start(make_config(**CASES[about]), torch.float32, noise=0.05)
    packs(model)
    packed, alone = numbers_of(model, True), numbers_of(model, False)
    exact = numbers_of(model.double(), False)
    of_alone = max(errors_of(alone, exact).values())
    for dtype, errors in ((64, errors_of(numbers_of(model, True), exact)), (32, errors_of(packed, exact))):
        for what, error in errors.items():
            most = 1e-12 if dtype == 64 else max(1e-5, 3 * of_alone)
            assert error < most, f"packed documents have other {what} than alone, by {error:.0e} in float{dtype}"


@every_readout
@torch.no_grad()
def test_a_border_may_stand_anywhere(about):
    """Before each token of a text but its first, in a row of its own."""
    model, logits = model_and_logits(about)
    packs(model)
    rows = [[border, T - border] for border in range(1, T)]
    packed = model(IDX[:1].expand(len(rows), -1), document=places_of(rows))
    for (border, _), row in zip(rows, packed, strict=True):
        alone = torch.cat([logits[0, :border], model(IDX[:1, border:])[0]])
        difference = float((row - alone).abs().max() / alone.abs().max().clamp(min=1.0))
        assert difference < 1e-12, (
            f"with a border before token {border}, documents have other logits than alone, by {difference:.0e}"
        )


# -- What a class declares ---------------------------------------------------------------------------------------------


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
        weights = weights_of(seen)
        is_signed = mixer.has_positive_weights and bool((weights < 0).any())
        assert not is_signed, "has_positive_weights=True, but some of its explicit_weights are negative"
        readout = torch.einsum("bhij,bjhd->bihd", weights, v)
        expected = mixer.read(p, None, 0)
        if mixer.norm_kind == "denominator":
            expected = expected[..., :-1] / expected[..., -1:].clamp(min=1e-6)
        assert (readout - expected).abs().max() < 1e-10


@every_mixer
@torch.no_grad()
def test_positive_weights_can_be_summed_in_a_denominator(about):
    """`read` then has one more channel, the sum of the weights: the readout of values of one."""
    keys = CASES[about] | {"readout_norm": "denominator"}
    if not MIXERS[keys["attention"]].has_positive_weights or not is_valid(**keys):
        return
    why = "has_positive_weights=True lets readout_norm='denominator' through"
    mixer = make_model(about, readout_norm="denominator").blocks[0].mixer
    p = mixer.gated_projection(torch.randn(2, T, 32, dtype=torch.float64))
    ones = mixer.read(p.replace(v=torch.ones_like(p.v)), None, 0)
    assert ones.shape[-1] == mixer.value_width + 1, f"{why}, but its readout has no channel for the denominator"
    assert ones.min() >= 0, f"{why}, but the sum of its weights is negative"
    assert (ones - ones[..., -1:]).abs().max() < 1e-10, f"{why}, but its last channel is not the sum of its weights"


@every_readout
@torch.no_grad()
def test_a_factor_on_q_is_a_factor_on_the_readout_where_is_linear_in_query(about):
    """Gates on q that a norm would cancel are refused by it."""
    mixer, x = make_model(about).blocks[0].mixer, torch.randn(2, T, 32, dtype=torch.float64)

    def readout(position, factor):
        def gated(at, y, x):
            return y * factor.repeat_interleave(y.shape[1] // T, dim=1) if at == position else y

        mixer.gated = gated
        p = mixer.gated_projection(x)
        o = mixer.read(p, None, 0)[..., : mixer.value_width]  # without a denominator
        return o if p.skip is None else o + p.skip

    if mixer.is_linear_in_query:
        factor = torch.rand(2, T, 1, 1, dtype=torch.float64) + 0.5
        expected = factor * readout("none", factor)
        is_linear = (readout("query", factor) - expected).abs().max() < 1e-9 * expected.abs().max()
        assert is_linear, "is_linear_in_query=True, but a factor on q is not one on the readout"


def compare_flops(counted, declared, what):
    ratio = declared / counted
    assert 1 / FLOPS_FACTOR <= ratio <= FLOPS_FACTOR, (
        f"{what}: {declared:.3g} FLOPs a token are declared, and {counted:.3g} counted; a factor of up to "
        f"{FLOPS_FACTOR} is let pass"
    )


@every_readout
@torch.no_grad()
def test_flops_per_token_are_about_those_counted(about):
    """Of the readout, and of the whole mixer: 2 for each parameter beside flops_per_token. Without `window`, whose mask
    hides most of what the plain form computes."""
    mixer, x = make_model(about, window="none").blocks[0].mixer, torch.randn(1, T, 32, dtype=torch.float64)
    p = mixer.gated_projection(x)
    counted, declared = count_flops(lambda: mixer.read(p, None, 0)) / T, mixer.flops_per_token(T)
    compare_flops(counted, declared, f"flops_per_token({T})")
    declared += 2 * sum(parameter.numel() for parameter in mixer.parameters())
    compare_flops(count_flops(lambda: mixer(x)) / T, declared, "flops_per_token and 2 for each parameter")


@every_mlp
@torch.no_grad()
def test_the_flops_of_an_mlp_are_about_two_for_each_parameter_that_is_not_idle(about):
    """A plain form may compute what is idle, too."""
    mlp, x = make_model(about).blocks[0].mlp, torch.randn(2, T, 32, dtype=torch.float64)
    every, counted = 2 * sum(p.numel() for p in mlp.parameters()), count_flops(lambda: mlp(x)) / (2 * T)
    active = every - 2 * mlp.n_idle
    assert 0 < active <= every, f"n_idle={mlp.n_idle} of {every // 2} parameters"
    assert active / 2 <= counted <= 2 * every, (
        f"{counted:.3g} FLOPs a token are counted; 2 for each parameter are {every:.3g}, without n_idle {active:.3g}"
    )
