"""What a user adds to model.py: each edit is as short as promised, is right, and trains in a copy of the repository.

The edits are the classes of edits.py, and those that the README shows.
"""

import inspect
import itertools
import math
import os
import re
import shutil
import subprocess
import sys

import edits
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import LINES, ROOT, Helpers
from small_models import off_its_start
from test_model import C, D, H, T, in_pieces, make_config, make_mixer, random_x

import model
import train
from model import GPT, MIXERS, MLPS
from runs import checkpoint as checkpoints
from runs import muon

CLOSE = dict(rtol=1e-9, atol=1e-9)
# lines that are not blank, with the one in the table
BUDGET = {"RetNet": 17, "Window": 10, "ALiBi": 10, "WindowedALiBi": 10, "LongConv": 21, "Experts": 21}
NAMES = ["lightning", *(name.lower() for name in BUDGET if name != "Experts")]  # of mixers, and the README's


def text_of(name):
    """The edit: the class, and its line in the table."""
    table = "MLPS" if name == "Experts" else "MIXERS"
    return f"{inspect.getsource(getattr(edits, name))}\n\n{table}[{name.lower()!r}] = {name}\n"


@pytest.mark.parametrize("name", BUDGET)
def test_an_edit_is_as_short_as_promised(name):
    assert sum(line.strip() != "" for line in text_of(name).splitlines()) <= BUDGET[name]


# -- Against their definitions, in float64; windows and ALiBi: test_softmax.py -----------------------------------------


@pytest.fixture(autouse=True)
def known(monkeypatch):
    for name in BUDGET:
        monkeypatch.setitem(MLPS if name == "Experts" else MIXERS, name.lower(), getattr(edits, name))


@torch.no_grad()
def test_retnet_is_its_definition():
    """o_i = sum_j gamma^(i-j) Re(q_i e^(i theta) conj(k_j e^(j theta))) v_j, normed by head, gated, projected."""
    mixer, x = make_mixer("retnet", "native"), random_x()
    q, k, v = mixer.qkv(x).unflatten(-1, (H, -1)).split([D, D, 2 * D], dim=-1)
    angles = torch.arange(T)[:, None, None] * 10000.0 ** -(torch.arange(D // 2, dtype=torch.float64) / (D // 2))
    q, k = (torch.complex(*y.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles) for y in (q, k))
    gamma, i = (1 - 2.0 ** -(5 + torch.arange(H))).double()[:, None, None], torch.arange(T)
    weights = (gamma ** (i[:, None] - i) * torch.einsum("bihd,bjhd->bhij", q, k.conj()).real / math.sqrt(D)).tril()
    o = F.rms_norm(torch.einsum("bhij,bjhd->bihd", weights, v), [2 * D], mixer.norm.weight, mixer.config.norm_eps)
    expected = mixer.out_proj((o * F.silu(mixer.gates["native"].logits(x)).view_as(o)).flatten(2))
    close = dict(rtol=1e-6, atol=1e-6)  # the decay's logarithm is a float32 number
    torch.testing.assert_close(mixer(x), expected, **close)
    torch.testing.assert_close(in_pieces(mixer, x, 9, 20), expected, **close)


@torch.no_grad()
def test_a_long_convolution_is_its_definition_and_has_no_weights():
    mixer, x = make_mixer("longconv"), random_x(T + 9)
    q, k, v = mixer.qkv(x).view(2, -1, 3, C).unbind(2)
    o = F.conv1d(F.pad((k * v).mT, (T - 1, 0)), mixer.conv.weight.T[:, None], groups=C).mT
    expected = mixer.out_proj(q * o)
    torch.testing.assert_close(mixer(x[:, :T]), expected[:, :T], **CLOSE)
    torch.testing.assert_close(in_pieces(mixer, x, 9, 20), expected, **CLOSE)
    assert mixer.explicit_weights is None


def test_a_mixture_of_experts_sends_a_token_to_one_trains_its_auxiliary_loss_and_counts_what_is_active():
    gpt, idx = off_its_start(make_config(mlp="experts"), noise=0.2), torch.randint(50, (2, T))
    x, mlp = random_x(), gpt.blocks[0].mlp
    share = mlp.router(x).softmax(-1)
    for b, t in itertools.product(range(2), range(T)):
        best = int(share[b, t].argmax())
        torch.testing.assert_close(mlp(x)[b, t], share[b, t, best] * mlp.experts[best](x[b, t]))
    targets = idx.masked_fill(idx % 2 == 0, -100)
    plain = gpt(idx, targets)  # in evaluation
    torch.testing.assert_close(plain, F.cross_entropy(gpt(idx).flatten(0, 1), targets.flatten()))
    for reduction, n in (("mean", 1), ("sum", (targets != -100).sum())):
        loss = gpt.train()(idx, targets, reduction=reduction)
        auxiliary = sum(block.mlp.auxiliary_loss for block in gpt.blocks)
        assert auxiliary > 0.01
        torch.testing.assert_close(loss, n * (plain + auxiliary))
        routers = [block.mlp.router.weight for block in gpt.blocks]
        grads = (torch.autograd.grad(y, routers, retain_graph=True) for y in (loss, n * (plain + auxiliary)))
        torch.testing.assert_close(*grads)
    dense = GPT(make_config())
    expert = sum(p.numel() for p in mlp.experts[0].parameters())
    assert gpt.n_params() == dense.n_params() + 2 * (3 * expert + 4 * C)
    assert gpt.flops_per_token() == dense.flops_per_token() + 2 * 2 * 4 * C


def test_muon_steps_each_projection_of_the_readme_s_mixer_by_itself(monkeypatch):
    monkeypatch.setitem(MIXERS, "lightning", None)  # and away again behind the test
    exec(blocks_of_readme()[1], dict(vars(model)))
    gpt = GPT(make_config(attention="lightning"))
    fused = [block.mixer.qkv for block in gpt.blocks]
    assert fused and all(muon.matrices_of(gpt)[qkv.weight] == [C, C, C] for qkv in fused)


# -- In a copy: these edits, and those that the README shows -----------------------------------------------------------


def after(file, before, new):
    """Puts text behind the only place of a file that has the words before it."""
    head, place, tail = file.read_text().partition(before)
    assert place and before not in tail
    file.write_text(head + place + new + tail)


def blocks_of_readme():
    """The edits that the README shows: a gate activation, a mixer, the loss, a data set and the optimizer."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    blocks = blocks_of_readme()
    assert all(len(code.splitlines()) < 25 for code in blocks)
    activation, mixer, _, data, optimizer = blocks  # another loss would not be the contract's
    folder = tmp_path_factory.mktemp("edited") / "copy"
    left_out = shutil.ignore_patterns(".*", "out", "results", "docs", "*.npy", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=left_out)
    for name, code in (("gate.py", activation), ("model.py", "\n\n".join([mixer, *map(text_of, BUDGET)]))):
        with open(folder / name, "a", encoding="utf-8") as file:
            file.write("\n\n" + code)
    # a position of the gate and a norm of the readout are a line or two
    after(folder / "gate.py", "POSITIONS = {", '\n    "input": lambda mixer: (1, mixer.config.n_embd),')
    line = '        x = self.gated("input", x[:, :, None], x).squeeze(2)'
    start_of_forward = "NotImplementedError\n\n    def forward(self, x, state=None, start=0, document=None):"
    after(folder / "mixer.py", start_of_forward, f"\n{line}")
    key = '"RMSNorm on q and k of softmax layers, before RoPE")'
    after(folder / "keys.py", key, '\n    mine: float = key(0.5, "what it is for", above=0)')
    after(folder / "mixer.py", 'READOUT_NORMS = {"rms": RMSNorm', ', "layer": nn.LayerNorm')
    (folder / "data" / "mine").mkdir()
    (folder / "data" / "mine" / "prepare.py").write_text(data)
    function = re.compile(r"^def make_optimizers\(.*?(?=^[\w#@])", re.M | re.S)
    source, count = function.subn(lambda _: optimizer + "\n\n", (folder / "train.py").read_text())
    assert count == 1
    (folder / "train.py").write_text(source)
    (folder / "book.txt").write_text("".join(LINES * 30))
    return folder


def run_in(folder, *words):
    ended = Helpers.script(*words, cwd=folder)
    assert ended.returncode == 0, (ended.stdout + ended.stderr).decode()
    return ended.stdout.decode()


IN_TURN = """
import runpy, sys
for line in sys.argv[1:]:
    sys.argv = line.split()
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_copy_with_all_edits_prepares_trains_resumes_and_measures(copy, helpers):
    keys = dict(n_layer=len(NAMES), max_iters=2, dataset="data/mine", attention=",".join(NAMES), mlp="experts")
    keys |= dict(gate="elementwise@input", gate_activation="hardsigmoid", readout_norm="layer", mine=0.25)
    keys["out_dir"] = "out/mine"
    scripts = [
        "data/mine/prepare.py book.txt",
        " ".join(["train.py", *helpers.words(**helpers.tiny | keys)]),
        "train.py --out_dir=out/mine --init_from=resume --max_iters=4",
        "meters.py --checkpoint=out/mine --device=cpu --rows=2",
    ]
    printed = run_in(copy, "-c", IN_TURN, *scripts)
    assert len(helpers.losses(copy / "out" / "mine")) == 4
    assert "written: out/mine/meters.json" in printed
    assert "what it is for" in run_in(copy, "train.py", "--help")


def test_the_readme_s_data_set_is_utf_8_where_the_locale_is_not(copy, tmp_path):
    book = "".join(LINES * 30).encode()
    (tmp_path / "book.txt").write_bytes(book)
    no_utf_8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "data/mine/prepare.py", str(tmp_path / "book.txt")]
    ended = subprocess.run(command, cwd=copy, env=os.environ | no_utf_8, capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    shards = [np.load(copy / "data" / "mine" / f"{split}_0000.npy") for split in ("train", "val")]
    assert np.concatenate(shards).astype(np.uint8).tobytes() == book


@pytest.mark.parametrize("gates", ["(none or headwise)", pytest.param("", marks=pytest.mark.slow)])
def test_an_edited_mixer_keeps_the_contract_of_all_mixers(copy, gates):
    """What make check runs, on some gates in CI and on all of them in the slow form."""
    chosen = "(" + " or ".join(NAMES) + ")"
    words = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "not slow", "tests/test_contract.py", "-k"]
    printed = run_in(copy, *words, f"{chosen} and {gates}" if gates else chosen)
    assert "no mixer here has weights" in printed


def test_the_readme_s_loss_is_that_of_the_tokens_and_the_square_of_the_logits_log_sum(monkeypatch):
    monkeypatch.setattr(GPT, "loss", GPT.loss)  # and back again behind the test
    exec(blocks_of_readme()[2], dict(vars(model)))
    gpt, idx = off_its_start(make_config(), noise=0.2), torch.randint(50, (2, T))
    targets = idx.masked_fill(idx % 2 == 0, -100)
    logits = gpt(idx)
    z = logits[targets != -100].logsumexp(-1)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 1e-4 * z.square().mean()
    torch.testing.assert_close(gpt(idx, targets), expected)


def test_a_run_with_the_readme_s_optimizer_resumes_to_the_bit(mqar, helpers, tmp_path, monkeypatch):
    names = {"torch": torch}
    exec(blocks_of_readme()[4], names)
    monkeypatch.setattr(train, "make_optimizers", names["make_optimizers"])
    whole = helpers.train(mqar, tmp_path / "whole", gate="elementwise", max_iters=4, schedule="constant")
    helpers.train(mqar, tmp_path / "half", gate="elementwise", max_iters=2, schedule="constant")
    train.main([f"--out_dir={tmp_path / 'half'}", "--init_from=resume", "--max_iters=4"])
    assert helpers.losses(tmp_path / "half") == helpers.losses(whole)
    models = (checkpoints.load(folder)["model"] for folder in (tmp_path / "half", whole))
    assert helpers.equal(*models)
