"""Wrong mixers and MLPs: test_contract.py, which make check runs, fails for each and says what is wrong with it."""

import inspect

import edits
import pytest
import test_contract
import torch
import torch.nn as nn
import torch.nn.functional as F

from mixer import Mixer
from model import GLA, MIXERS, MLP, MLPS, CosFormer, DeltaNet, Mamba2, Softmax
from ops.fast import at_least_float32
from ops.layers import ShortConv

# each test of one case; compiling is slow, and none of these classes breaks it
CHECKS = {
    name.removeprefix("test_"): check
    for name, check in vars(test_contract).items()
    if name.startswith("test_") and "compiles" not in name
}


@pytest.fixture
def broken(monkeypatch):
    """broken(cls, key=value, ...) -> {name of a broken promise: its message} of a model without a gate, with cls."""

    def check(cls, **keys):
        if issubclass(cls, Mixer):
            monkeypatch.setitem(MIXERS, "wrong", cls)
            keys = dict(attention="wrong", gate="none") | keys
        else:
            monkeypatch.setitem(MLPS, "wrong", cls)
            keys = dict(attention="softmax", gate="none", mlp="wrong") | keys
        monkeypatch.setitem(test_contract.CASES, "wrong", keys)
        test_contract.model_and_logits.cache_clear()
        found = {}
        for name, test in CHECKS.items():
            torch.manual_seed(0)
            try:
                test("wrong")
            except pytest.skip.Exception:
                pass
            except Exception as error:
                found[name] = str(error).partition("\nassert")[0]
        test_contract.model_and_logits.cache_clear()
        return found

    return check


# -- The state ---------------------------------------------------------------------------------------------------------

PAST = "past_block_size_a_state_does_what_past_block_size_declares"


class ForgetsInPieces(Softmax):
    """Its ring is never written past block_size: a text read at once sees other keys than one read in pieces."""

    def read(self, p, state, start):
        if state is not None and start >= self.config.block_size:
            state = {name: tensor.clone() for name, tensor in state.items()}
        return super().read(p, state, start)


class RollsUndeclared(Softmax):
    past_block_size = "goes on"


class NeverRolls(GLA):
    past_block_size = "rolls"


class NeverEnds(GLA):
    past_block_size = "ends"


class EndsUndeclared(CosFormer):
    past_block_size = "goes on"


class Stops(GLA):
    past_block_size = "stops"


class Unread(GLA):
    def state_shapes(self, B, length):
        return super().state_shapes(B, length) | {"count": (B, 1)}


class KeepsThePrefill(GLA):
    """The decay of the last token acts on the next."""

    def project(self, x, state, start):
        p = super().project(x, state, start)
        before = torch.zeros_like(p.v[:, :1]) if state is None else state["last"][:, None]
        v = p.v + torch.cat([before, p.v[:, :-1]], dim=1)
        if state is not None:
            state["last"] = p.v[:, -1]
        return p._replace(v=v)

    def state_shapes(self, B, length):
        return super().state_shapes(B, length) | {"last": (B, self.n_head, self.value_width)}


class Undeclared(KeepsThePrefill):
    state_shapes = GLA.state_shapes

    def project(self, x, state, start):
        if state is not None and "last" not in state:
            state["last"] = x.new_zeros(len(x), self.n_head, self.value_width)
        return super().project(x, state, start)


OTHER_STATE = "a_state_has_the_tensors_and_the_bytes_of_init_state"
DECODING = "prefill_then_steps_equals_the_full_forward"


class OneConvolutionTwice(GLA):
    """Its past is that of the last call."""

    def __init__(self, config, gate):
        super().__init__(config, gate)
        self.short = ShortConv(config.n_embd, 3, bias=False)

    def project(self, x, state, start):
        return super().project(self.short(self.short(x, state), state), state, start)


# -- What a class declares ---------------------------------------------------------------------------------------------

LINEAR = "a_factor_on_q_is_a_factor_on_the_readout_where_is_linear_in_query"
FLOPS = "flops_per_token_are_about_those_counted"
CAUSAL = "later_tokens_leave_earlier_logits_bit_equal"
WEIGHTS, DENOMINATOR = "explicit_weights_reproduce_the_readout", "positive_weights_can_be_summed_in_a_denominator"


class LinearInQueries(Softmax):
    is_linear_in_query = True


class LinearInQueriesBesideASkip(Mamba2):
    is_linear_in_query = True


class CostsTwoHundredTimes(GLA):
    flops_per_entry = 1000


class CostsNothing(edits.LongConv):
    def flops_per_token(self, T):
        return super().flops_per_token(T) / 200


class NegativeWeights(GLA):
    has_positive_weights = True


class NoDenominator(edits.LongConv):
    has_positive_weights = True


class AnotherDenominator(CosFormer):
    def read(self, p, state, start):
        o = super().read(p, state, start)
        return torch.cat([o[..., :-1], o[..., -1:] + 1], dim=-1)

    has_levels = True


class FFT(edits.LongConv):
    """The whole text by an FFT. Decoding computes the sum, from a state of the same tensor."""

    tolerance = 1e-5

    def read(self, p, state, start):
        if state is not None:
            return super().read(p, state, start)
        kv, n = at_least_float32(p.k * p.v).flatten(2), 2 * p.v.shape[1]  # (B, T, C)
        filters = at_least_float32(self.conv.weight).flip(0)[: n // 2]  # (T, C), that of a token's own k v first
        o = torch.fft.irfft(torch.fft.rfft(kv, n, dim=1) * torch.fft.rfft(filters, n, dim=0), n, dim=1)[:, : n // 2]
        return p.q * o.view_as(p.q).to(p.q.dtype)


class UndeclaredFFT(FFT):
    tolerance = 0.0


class ToleratesAnything(FFT):
    tolerance = 1.0


class LooksAhead(GLA):
    """A millionth of the mean over all tokens: less than its tolerance."""

    tolerance = 1e-5

    def project(self, x, state, start):
        p = super().project(x, state, start)
        return p if state is not None else p._replace(v=p.v + 1e-7 * p.v.mean(1, keepdim=True))


PACKED, BORDER = "packed_documents_have_the_logits_losses_and_gradients_of_each_alone", "a_border_may_stand_anywhere"


class ReadsOverBorders(DeltaNet):
    """Its convolution does not look at the documents."""

    def project(self, x, state, start, document=None):
        return super().project(x, state, start)


class PacksItsOwnRead(edits.LongConv):
    def read(self, p, state, start):
        return super().read(p, state, start)

    past_block_size = "rolls"
    reads_packed = True


# -- MLPs --------------------------------------------------------------------------------------------------------------

ALONE = "an_mlp_works_on_each_token_alone"
MLP_FLOPS = "the_flops_of_an_mlp_are_about_two_for_each_parameter_that_is_not_idle"
GRADIENTS = "gradients_reach_every_parameter_and_are_finite"
START = "a_start_depends_on_the_seed_and_the_name_alone"
DTYPE = "it_computes_in_the_dtype_of_its_model_and_under_autocast"


class TokenShift(MLP):
    def forward(self, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return super().forward(x + 0.5 * before)


class MeanOverTheText(MLP):
    def forward(self, x):
        return super().forward(x + x.mean(1, keepdim=True))


class MeanOverTheRows(MLP):
    def forward(self, x):
        return super().forward(x + x.mean(0, keepdim=True))


class Unreached(MLP):
    def __init__(self, config, hidden):
        super().__init__(config, hidden)
        self.forgotten = nn.Linear(2, 2, bias=False)


class Cut(MLP):
    def forward(self, x):
        return self.down(F.gelu(self.up(x).detach()))


class OwnDraws(MLP):
    def __init__(self, config, hidden):
        super().__init__(config, hidden)
        self.register_buffer("mask", (torch.rand(config.n_embd) < 0.5).float())

    def forward(self, x):
        return super().forward(x * self.mask.to(x.dtype))


class StartsAtInfinity(MLP):
    def __init__(self, config, hidden):
        super().__init__(config, hidden)
        self.scale = nn.Parameter(torch.zeros(1))

    def init_parameter(self, name, start, generator):
        start.log_()

    def forward(self, x):
        return super().forward(x) * self.scale.sigmoid()


class ManyTimes(MLP):
    def forward(self, x):
        return sum(super(ManyTimes, self).forward(x) for _ in range(200)) / 200


class AllIdle(MLP):
    def __init__(self, config, hidden):
        super().__init__(config, hidden)
        self.n_idle = sum(p.numel() for p in self.parameters())


class AlwaysFloat32(MLP):
    def forward(self, x):
        return super().forward(x) * torch.ones(x.shape[-1], dtype=torch.float32)


WRONG = [
    (ForgetsInPieces, PAST, "past block_size=16 it decodes other logits in pieces of [15, 1, 1, 27] than at once"),
    (RollsUndeclared, PAST, "past_block_size='goes on', but past it decoded logits are not those of the whole text"),
    (NeverRolls, PAST, "past_block_size='rolls', but a token that lies further back"),
    (NeverEnds, PAST, "past_block_size='ends', but no UserError stops a text longer than block_size"),
    (EndsUndeclared, PAST, "past_block_size='goes on', but it is refused: cosformer: position 17 is past"),
    (Stops, PAST, "past_block_size='stops': must be rolls, ends or goes on"),
    (Unread, "every_tensor_of_the_state_is_read", "state['count'] is never used"),
    (Undeclared, OTHER_STATE, "the state has other tensors than init_state"),
    (KeepsThePrefill, OTHER_STATE, "state['last'] has 512 bytes and keeps 66048 alive: it is a view; store a .clone()"),
    (OneConvolutionTwice, DECODING, ""),
    (LinearInQueries, LINEAR, "is_linear_in_query=True, but a factor on q is not one on the readout"),
    (LinearInQueriesBesideASkip, LINEAR, "is_linear_in_query=True"),
    (CostsTwoHundredTimes, FLOPS, "flops_per_token(44): 2.56e+05 FLOPs a token are declared, and"),
    (CostsNothing, FLOPS, "flops_per_token(44): 7.52 FLOPs a token are declared, and"),
    (NegativeWeights, WEIGHTS, "has_positive_weights=True, but some of its explicit_weights are negative"),
    (NoDenominator, DENOMINATOR, "has_positive_weights=True lets readout_norm='denominator' through, but its readout"),
    (AnotherDenominator, DENOMINATOR, "but its last channel is not the sum of its weights"),
    (UndeclaredFFT, CAUSAL, "if that is rounding, as an FFT's, declare a `tolerance`"),
    (ToleratesAnything, CAUSAL, "tolerance=1: rounding is 0.0001 at most"),
    (LooksAhead, CAUSAL, "in float64 later tokens change earlier logits"),
    (ReadsOverBorders, PACKED, "packed documents have other logits than alone, by"),
    (PacksItsOwnRead, BORDER, "with a border before token 1, documents have other logits than alone, by"),
    (TokenShift, ALONE, "a token's output depends on the tokens before it or behind it"),
    (MeanOverTheText, CAUSAL, "later tokens change earlier logits by"),
    (MeanOverTheRows, ALONE, "a token's output depends on the other rows of the batch"),
    (Unreached, GRADIENTS, "no gradient reaches blocks.0.mlp.forgotten.weight"),
    (Cut, GRADIENTS, "no gradient reaches blocks.0.norm_2.weight"),
    (OwnDraws, START, "blocks.0.mlp.mask starts elsewhere if the model has one parameter more"),
    (StartsAtInfinity, START, "blocks.0.mlp.scale starts at -inf"),
    (ManyTimes, MLP_FLOPS, "FLOPs a token are counted; 2 for each parameter are"),
    (AllIdle, MLP_FLOPS, "n_idle=8192 of 8192 parameters"),
    (AlwaysFloat32, DTYPE, "AlwaysFloat32 makes torch.float32 of torch.bfloat16"),
]


@pytest.mark.parametrize("cls, promise, message", WRONG, ids=[cls.__name__ for cls, *_ in WRONG])
def test_a_wrong_class_breaks_the_promise_and_is_told_why(broken, cls, promise, message):
    found = broken(cls)
    assert promise in found and message in found[promise], found


def test_each_wrong_class_breaks_no_promise_without_its_fault(broken):
    for cls in (FFT, GLA, Softmax, CosFormer, DeltaNet, Mamba2, edits.LongConv, MLP, edits.Experts):
        assert broken(cls) == {}, cls


# -- What is right, and was thought wrong ------------------------------------------------------------------------------


class ThreeConvolutions(GLA):
    """One each for q, k and v, as fla's layers have them; their widths differ."""

    def __init__(self, config, gate):
        super().__init__(config, gate)
        self.convs = nn.ModuleList(ShortConv(n, 2 + i, bias=True) for i, n in enumerate(self.split))

    def project(self, x, state, start):
        parts = self.qkv(x).split(self.split, dim=-1)
        q, k, v = (
            F.silu(conv(y, state)).unflatten(-1, (self.n_head, -1)) for conv, y in zip(self.convs, parts, strict=True)
        )
        return super().project(x, None, start)._replace(q=q, k=k, v=v)


def test_several_short_convolutions_have_a_state_each(broken):
    assert broken(ThreeConvolutions) == {}
    state = test_contract.make_model("wrong").init_state(2)[0]
    assert {name: tensor.shape for name, tensor in state.items() if "conv" in name} == {
        "convs.0": (2, 1, 32), "convs.1": (2, 2, 32), "convs.2": (2, 3, 32),
    }  # fmt: skip


class SparseAndUnreached(edits.Sparse):
    """Not even the router is read: more is left out than may be idle."""

    def forward(self, x):
        return x


def test_experts_that_get_no_token_break_no_promise_and_what_none_reaches_does(broken):
    assert broken(edits.Sparse) == {}
    assert "no gradient reaches blocks.0.mlp.router.weight" in broken(SparseAndUnreached)[GRADIENTS]


AS_MAKE_CHECK = f"""
import os, sys
sys.path.insert(0, ".")
os.environ["MIXER"], os.environ["MLP"] = "", "shift"
import pytest
import torch.nn.functional as F
from model import MLP, MLPS

{inspect.getsource(TokenShift)}
MLPS["shift"] = TokenShift
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/test_contract.py", "-k", "softmax and none"]))
"""


def test_the_first_line_of_make_check_names_the_broken_promise_and_what_is_wrong(helpers):
    ended = helpers.script("-c", AS_MAKE_CHECK)
    first = ended.stdout.decode().partition("\n")[0]
    assert ended.returncode == 1 and first == (
        "shift breaks a promise: an mlp works on each token alone [softmax, none]; "
        "a token's output depends on the tokens before it or behind it"
    )
