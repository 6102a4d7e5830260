"""Muon: what it orthogonalises, against the singular value decomposition and torch's; what it leaves to AdamW."""

import pytest
import torch
import torch.nn as nn
from small_models import off_its_start

import train
from base.configurator import UserError
from model import GPT, MIXERS, GPTConfig
from ops.layers import FusedLinear
from runs.muon import COEFFICIENTS, Muon, matrices_of, orthogonalised, step_of_matrices

SMALL = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=20, block_size=16, state_size=4)


def by_definition(x):
    """U S' V^T of one matrix, where S' are its singular values, behind the polynomial five times: near 1."""
    U, S, Vh = torch.linalg.svd(x, full_matrices=False)
    S, (a, b, c) = S / S.norm(), COEFFICIENTS
    for _ in range(5):
        S = a * S + b * S**3 + c * S**5
    assert ((S > 0.6) & (S < 1.3)).all()
    return U * S @ Vh


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (5, 5), (1, 6)], ids=str)
def test_singular_vectors_stay_and_singular_values_go_through_the_polynomial(shape):
    batch = torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([by_definition(x) for x in batch])
    torch.testing.assert_close(torch.stack([orthogonalised(x) for x in batch]), expected)
    torch.testing.assert_close(orthogonalised(batch), expected)
    assert not orthogonalised(0 * batch).any() and not orthogonalised(0 * batch[0]).any()


def stepped(weights, grads, rows=None, is_torchs=False):
    """The weights after one step for each list of gradients. rows: of the matrices in each; without it, it is one."""
    weights = [nn.Parameter(w.clone()) for w in weights]
    groups = [{"params": weights, "weight_decay": 0.5}]
    if is_torchs:
        optimizer = torch.optim.Muon(groups, 0.02, adjust_lr_fn="match_rms_adamw")
    else:
        optimizer = Muon(groups, {w: rows or [len(w)] for w in weights}, 0.02)
    for each in grads:
        for w, grad in zip(weights, each, strict=True):
            w.grad = grad
        optimizer.step()
    return weights


def random_steps(*shapes, dtype=torch.float64):
    """A tensor of each shape, and three more of each as gradients."""
    generator = torch.Generator().manual_seed(0)
    first, *grads = ([torch.randn(s, generator=generator, dtype=dtype) for s in shapes] for _ in range(4))
    return first, grads


def test_a_fused_matrix_steps_as_separate_ones_would_and_not_as_one():
    weights, grads = random_steps((6, 8), (3, 8), (12, 8), (1, 8))
    apart = stepped(weights, grads)
    fused = [torch.cat(weights)], [[torch.cat(each)] for each in grads]
    (together,) = stepped(*fused, rows=[6, 3, 12, 1])
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-12, atol=1e-12)
    (as_one,) = stepped(*fused)
    assert (as_one - together).abs().max() > 0.005


def test_a_matrix_steps_as_torch_s_muon_would():
    weights, grads = random_steps((24, 16), (16, 40), dtype=torch.float32)
    both = stepped(weights, grads), stepped(weights, grads, is_torchs=True)
    for start, mine, theirs in zip(weights, *both, strict=True):
        assert (mine - theirs).norm() < 0.02 * (mine - start).norm()  # torch's iteration is in bfloat16


def test_the_mean_of_the_gradients_is_nesterovs_with_the_momentum_that_torch_s_muon_has():
    """Of gradients e0 and e1 the second mean is (1 - m) (m^2 e0 + (1 + m) e1); a row keeps its direction."""
    m = torch.optim.Muon([nn.Parameter(torch.zeros(1, 8))]).defaults["momentum"]
    e0, e1 = torch.eye(8, dtype=torch.float64)[:2, None]
    start = [torch.zeros(1, 8, dtype=torch.float64)]
    (first,), (second,) = stepped(start, [[e0]]), stepped(start, [[e0], [e1]])
    step = (second - (1 - 0.02 * 0.5) * first).detach()  # without the decay of the weight
    assert step[0, 0] / step[0, 1] == pytest.approx(m**2 / (1 + m)) and not step[0, 2:].any()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_step_that_is_told_of_an_infinity_changes_nothing_and_others_are_as_without_it(bad):
    (weights, grads), ends = random_steps((6, 8), dtype=torch.float32), []
    for told in (False, True):
        (w,) = (nn.Parameter(x.clone()) for x in weights)
        optimizer = Muon([{"params": [w], "weight_decay": 0.5}], {w: [6]}, 0.02)
        for (grad,) in grads:
            if told:
                before = w.clone()
                w.grad, optimizer.found_inf = grad.clone(), torch.ones(())
                w.grad[2, 3] = bad
                optimizer.step()
                assert torch.equal(w, before)
                optimizer.found_inf = torch.zeros(())
            w.grad = grad.clone()
            optimizer.step()
        ends.append((w.detach(), optimizer.state[w]["momentum_buffer"]))
    assert all(map(torch.equal, *ends))


READS = {  # what of a Projection each matrix of the fused projection changes
    "softmax": ["q", "k", "v"], "cosformer": ["q", "k", "v"], "gla": ["q", "k", "v"], "monarch": ["q", "k", "v"],
    "mamba2": ["v skip", "k", "q", "v log_decay"], "deltanet": ["q", "k", "v", "beta"],
    "gated_deltanet": ["q", "k", "v", "beta", "log_decay"], "kda": ["q", "k", "v", "beta"],
    "gated_deltanet2": ["q", "k erase", "v", "erase", "v"],
    "mamba3": ["v skip", "k", "q", "q k log_decay beta", "log_decay", "beta", "q k"],
    "deltaproduct": ["q", "k", "k", "v", "v", "beta", "beta", "log_decay"],
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", READS)
def test_the_first_and_last_row_of_each_matrix_of_a_mixer_change_what_it_is_for_alone(name):
    config = GPTConfig(**SMALL | dict(n_head=4, delta_sizes=[2, 4, 4, 6], n_kv_head=2), attention=name)
    mixer = off_its_start(config, noise=0.5).blocks[0].mixer
    (fused,) = [module for module in mixer.modules() if isinstance(module, FusedLinear)]
    x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before, start = mixer.project(x, None, 0)._asdict(), 0
    assert len(fused.parts) == len(READS[name]) and sum(fused.parts) == len(fused.weight)
    for rows, expected in zip(fused.parts, READS[name], strict=True):
        for row in (start, start + rows - 1):
            fused.weight[row] += 3.0 * x.mean((0, 1))
            after = mixer.project(x, None, 0)._asdict()
            fused.weight[row] -= 3.0 * x.mean((0, 1))
            changed = [part for part, y in after.items() if y is not None and (y - before[part]).abs().max() > 1e-9]
            assert changed == expected.split(), (start, row)
        start += rows


# the rows of each matrix with muon_split=head: 4 heads, of softmax 2 for k and v, of 4 channels; of the delta rule
# 2 of 4 channels for q and k, and 4 of 6; mamba2 and mamba3 have 8 of 4 for v, and share q and k
BY_HEAD = {
    "softmax": [4] * 8, "cosformer": [4] * 12, "gla": [4] * 8 + [6] * 4, "monarch": [64] * 8 + [4] * 4,
    "mamba2": [4] * 8 + [4, 4, 8], "deltanet": [4] * 4 + [6] * 4 + [4], "kda": [4] * 4 + [6] * 4 + [4],
    "gated_deltanet": [4] * 4 + [6] * 4 + [4, 4], "gated_deltanet2": [4] * 4 + [6] * 4 + [8, 24],
    "mamba3": [4] * 8 + [4, 4, 8, 8, 8, 1], "deltaproduct": [4] * 6 + [6] * 8 + [4, 4, 4],
}  # fmt: skip


def heads_that_change(before, after):
    """The heads of q, k and v, whose axis is the third, of which a number is another."""
    found = set()
    for part in ("q", "k", "v"):
        changed = (after[part] - before[part]).abs().amax((0, 1, 3)) > 1e-9
        found.update(changed.nonzero().flatten().tolist())
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", READS)
def test_by_head_a_matrix_is_one_head_of_q_k_or_v_and_the_rest_is_as_by_projection(name):
    sizes = [4, 4, 4, 6] if name == "gla" else [2, 4, 4, 6]
    config = GPTConfig(**SMALL | dict(n_head=4, delta_sizes=sizes, n_kv_head=2), attention=name, gate="native")
    gpt = off_its_start(config, noise=0.5)
    mixer = gpt.blocks[0].mixer
    (fused,) = [module for module in mixer.modules() if isinstance(module, FusedLinear)]
    whole, split = matrices_of(gpt), matrices_of(gpt, split="head")
    expected = [4] * 8 + [6] * 4 if name == "gla" else BY_HEAD[name]
    assert split[fused.weight] == expected and whole.keys() == split.keys()
    fine = [weight for weight in whole if whole[weight] != split[weight]]
    assert len(fine) == 2 and fine[0] is fused.weight  # one in each layer
    x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before, start, seen = mixer.project(x, None, 0)._asdict(), 0, []
    parts = [name for name, heads in zip(fused.parts, fused.heads, strict=True) for _ in range(heads) if heads > 1]
    for rows in expected[: len(parts)]:
        fused.weight[start : start + rows] += 3.0 * x.mean((0, 1))
        seen.append(heads_that_change(before, mixer.project(x, None, 0)._asdict()))
        fused.weight[start : start + rows] -= 3.0 * x.mean((0, 1))
        start += rows
    assert all(len(heads) == 1 for heads in seen)


def test_by_head_a_step_goes_along_the_singular_vectors_of_each_head():
    """Of softmax's fused weight, 4 heads of q, 2 of k and v, of 4 channels; out_proj and the MLP are whole."""
    keys = SMALL | dict(n_layer=1, n_head=4, n_kv_head=2, optimizer="muon", weight_decay=0.0)
    config = train.TrainConfig(**keys, muon_split="head")
    gpt = GPT(config).double()
    generator = torch.Generator().manual_seed(0)
    before, muon = {}, train.make_optimizers(gpt, config, "cpu")[0]
    for p in muon.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        before[p] = p.detach().clone()
    muon.step()
    qkv = gpt.blocks[0].mixer.qkv.weight
    for p, start in before.items():
        matrices = p.grad.split(4) if p is qkv else [p.grad]
        step = torch.cat([0.2 * max(one.shape) ** 0.5 * by_definition(one) for one in matrices])
        torch.testing.assert_close(p, start - config.learning_rate * step)
    assert len(before) == 4 and len(qkv) == 8 * 4


@pytest.mark.parametrize("rows", [[6] * 4 + [3, 1], [32] * 3, [5, 5, 20, 7]], ids=str)
def test_batches_of_equal_matrices_give_the_step_of_each_alone(rows):
    weight = torch.randn(sum(rows), 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(step_of_matrices(weight, rows, in_batches=True), step_of_matrices(weight, rows))


def test_a_run_may_go_on_with_another_split_since_the_moments_are_of_the_whole_weight(run, helpers, capsys):
    whole = run("whole", optimizer="muon", muon_split="head")
    out = run("out", optimizer="muon", max_iters=4)
    run("out", init_from="resume", max_iters=8, muon_split="head")
    assert "muon_split: head, where the checkpoint has projection" in capsys.readouterr().out
    losses = helpers.losses(out)
    assert losses.keys() == helpers.losses(whole).keys() and losses != helpers.losses(whole)


@pytest.mark.parametrize("name", [*MIXERS, "softmax,gated_deltanet"])
@pytest.mark.parametrize("more", [{}, dict(tie_embeddings=False, position="learned", short_conv=4, mlp="swiglu")])
def test_muon_has_the_linear_layers_of_the_blocks_and_no_embedding_output_layer_convolution_or_vector(name, more):
    config = train.TrainConfig(**SMALL, attention=name, gate="native+elementwise", optimizer="muon", **more)
    gpt = GPT(config)
    muon, adamw = train.make_optimizers(gpt, config, "cpu")
    theirs, ours = ({name for g in one.param_groups for name in g["param_names"]} for one in (muon, adamw))
    assert not theirs & ours and theirs | ours == {name for name, _ in gpt.named_parameters()}
    linears = {f"{path}.weight" for path, module in gpt.named_modules() if isinstance(module, nn.Linear)}
    assert theirs == linears - {"head.weight"} and "wte.weight" in ours
    assert all(sum(rows) == len(weight) for weight, rows in matrices_of(gpt).items())
    assert {group["weight_decay"] for group in muon.param_groups} == {0.1}
    assert {group["weight_decay"] for group in adamw.param_groups} == {0.1, 0.0}


# -- The gates' own rate, decay and optimizer -------------------------------------------------------------------------


def groups_by_name(config):
    """{name of a parameter: (its optimizer, lr_scale, weight decay)}"""
    found = {}
    for optimizer in train.make_optimizers(GPT(config), config, "cpu"):
        for group in optimizer.param_groups:
            for name in group["param_names"]:
                found[name] = (type(optimizer).__name__, group["lr_scale"], group["weight_decay"])
    return found


@pytest.mark.parametrize("name", MIXERS)
def test_gates_have_the_rate_and_the_decay_that_their_keys_say_and_no_other_parameter_does(name):
    keys = dict(gate="native+elementwise@readout+elementwise@value", gate_bias=1.0, attention=name)
    plain = groups_by_name(train.TrainConfig(**SMALL, **keys))
    ours = groups_by_name(train.TrainConfig(**SMALL, **keys, gate_lr_scale=0.3, gate_weight_decay=0.02))
    gates = {name for name in plain if ".gates." in name or ".native." in name}
    assert plain.keys() == ours.keys() and {".proj.bias" in name for name in gates} == {True, False}
    for name, (optimizer, scale, decay) in plain.items():
        is_matrix = decay > 0
        expected = (optimizer, 0.3, 0.02 if is_matrix else 0.0) if name in gates else (optimizer, scale, decay)
        assert ours[name] == expected, name
        assert scale == 1.0


def test_a_gate_can_stay_in_adamw_while_muon_steps_the_other_matrices():
    keys = dict(gate="native+elementwise", attention="gla", optimizer="muon", muon_lr_scale=1.5, gate_lr_scale=0.5)
    by_muon = groups_by_name(train.TrainConfig(**SMALL, **keys))
    by_adamw = groups_by_name(train.TrainConfig(**SMALL, **keys, gate_optimizer="adamw"))
    moved = {name for name in by_muon if by_muon[name] != by_adamw[name]}
    assert moved == {name for name in by_muon if ".gates." in name or ".native." in name}
    assert {by_muon[name] for name in moved} == {("Muon", 0.75, 0.1)}
    assert {by_adamw[name] for name in moved} == {("AdamW", 0.5, 0.1)}


def test_groups_of_gates_change_no_step_while_their_keys_are_left_alone():
    config = train.TrainConfig(**SMALL, gate="elementwise", weight_decay=0.2)
    ends = []
    for is_split in (False, True):
        torch.manual_seed(0)
        gpt = GPT(config)
        (adamw,) = train.make_optimizers(gpt, config, "cpu")
        if not is_split:
            matrices = [p for p in gpt.parameters() if p.dim() >= 2]
            vectors = [p for p in gpt.parameters() if p.dim() < 2]
            groups = [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}]
            adamw = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
        for _ in range(3):
            gpt(torch.arange(10)[None], torch.arange(10)[None]).backward()
            adamw.step()
        ends.append(gpt.state_dict())
    assert all(torch.equal(ends[0][name], tensor) for name, tensor in ends[1].items())


def test_muon_for_gates_alone_is_refused(helpers):
    assert "is for optimizer='muon'" in helpers.error_of(train.TrainConfig, **SMALL, gate_optimizer="muon")


def test_heads_that_do_not_divide_their_part_are_refused_in_a_line():
    with pytest.raises(UserError, match="heads=3 does not divide a part of 8 rows"):
        FusedLinear(4, [8, 8], heads=[3])
