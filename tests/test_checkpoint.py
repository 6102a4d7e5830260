"""Checkpoints: written whole or not at all; loaded without running code; every damage is one clear line. Exports."""

import pickle
import re
import resource
import signal

import pytest
import torch
from conftest import Malicious
from small_models import off_its_start

import evaluate
import sample
from base import configurator
from base.configurator import UserError
from hub import export
from model import GPT, MIXERS, GPTConfig, Softmax
from runs import checkpoint as checkpoints
from runs.checkpoint import load, load_model, save

ARGS = dict(n_layer=1, n_embd=8, n_head=2, block_size=16, vocab_size=11)


def make(**parts):
    """A checkpoint of as little as load_model needs, and these parts."""
    return {"format": 1, "model": GPT(GPTConfig(**ARGS)).state_dict(), "model_args": dict(ARGS), "iter_num": 7} | parts


@pytest.fixture
def file(tmp_path):
    save(tmp_path / "ckpt.pt", make())
    return tmp_path / "ckpt.pt"


@pytest.mark.parametrize("rank", [0, 1])  # of a machine's two
def test_each_process_finds_all_damage_by_itself_and_says_so(rank, file, monkeypatch, capsys, helpers):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, (rank, 2, rank, 2, 0, 0), strict=True):
        monkeypatch.setenv(name, str(value))
    whole = file.read_bytes()
    for weight in load(file)["model"].values():
        part = weight.numpy().tobytes()
        if any(part):
            file.write_bytes(whole.replace(part, bytes(len(part))))
            assert configurator.report(UserError(helpers.error_of(load, file))) == 2
            assert "damaged, the checksum of" in capsys.readouterr().err


def test_a_narrow_gate_comes_back_and_a_checkpoint_without_its_key_has_a_gate_of_all_channels(tmp_path):
    idx = torch.arange(11)[None]
    for width in (3, None):
        model = off_its_start(GPTConfig(**ARGS, gate="elementwise", gate_width=width), torch.float32)
        args = vars(model.config) | ({} if width else {"gate_width": "left out"})
        args = {name: value for name, value in args.items() if value != "left out"}
        save(tmp_path / "ckpt.pt", make(model=model.state_dict(), model_args=args))
        back, _ = load_model(tmp_path / "ckpt.pt")
        assert back.config.gate_width == width and torch.equal(back(idx), model(idx))


# -- Saving ------------------------------------------------------------------------------------------------------------


class Sloped(Softmax):
    """With what no checkpoint holds."""

    def __init__(self, config, gate):
        super().__init__(config, gate)
        self.register_buffer("slope", torch.linspace(0, 1, self.n_head), persistent=False)
        self.plain = torch.ones(1)

    def bias(self, i, j):
        return self.slope[:, None, None] * self.plain * (j - i)


def test_a_loaded_model_gives_the_logits_of_the_saved_one(tmp_path, monkeypatch):
    monkeypatch.setitem(MIXERS, "sloped", Sloped)
    args = ARGS | dict(attention="sloped,cosformer", gate="elementwise,none", n_layer=2, dropout=0.5, short_conv=3)
    model, idx = off_its_start(GPTConfig(**args), torch.float32, noise=1), torch.randint(11, (3, 16))
    save(tmp_path / "ckpt.pt", make(model=model.state_dict(), model_args=args, optimizer={"state": {}}))
    for path in (tmp_path / "ckpt.pt", str(tmp_path)):  # the file, or the out_dir
        loaded, checkpoint = load_model(path)
        assert not loaded.training and checkpoint["iter_num"] == 7 and "optimizer" not in checkpoint
        assert torch.equal(loaded(idx), model(idx))


def test_a_save_that_fails_midway_leaves_the_old_checkpoint_and_no_other_file(file, monkeypatch, helpers):
    before, (soft, hard) = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        message = helpers.error_of(save, file, make(model={"weight": torch.zeros(100_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message.startswith(f"{file}: cannot be written (") and "File too large" in message
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]
    monkeypatch.setattr(
        torch, "save", lambda checkpoint, out: out.write(before[:999]) and signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        save(file, make())
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


# -- Loading what is no checkpoint -------------------------------------------------------------------------------------


def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path, helpers):
    for content in (b"", b"PK", b"garbage" * 99, pickle.dumps({"model": 1}), b"\x80\x1f." * 9):
        (tmp_path / "ckpt.pt").write_bytes(content)
        assert "ckpt.pt: damaged, or no checkpoint of tensors" in helpers.error_of(load, tmp_path)


def test_every_flipped_bit_of_a_tensor_is_found(file, helpers):
    content, weight = file.read_bytes(), load(file)["model"]["norm.weight"].numpy().tobytes()
    begin = content.index(weight)
    for bit in range(8 * len(weight)):
        damaged = bytearray(content)
        damaged[begin + bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert "damaged, the checksum of" in helpers.error_of(load, file)


@pytest.mark.parametrize("where", ["model", "extra"])
def test_a_checkpoint_that_would_run_code_is_refused_and_does_not(tmp_path, helpers, where):
    torch.save(make() | {where: Malicious(tmp_path / "made")}, tmp_path / "ckpt.pt")
    assert "refused, it is damaged or holds more than tensors and plain values" in helpers.error_of(load, tmp_path)
    assert not (tmp_path / "made").exists()
    torch.load(tmp_path / "ckpt.pt", weights_only=False)  # with the one wrong flag it would have
    assert (tmp_path / "made").exists()


def test_another_format_is_refused_with_what_reads_it_and_so_are_weights_that_do_not_fit_the_config(file, helpers):
    assert load(file)["format"] == checkpoints.FORMAT
    other = "its format is {}, and this version reads 1 alone: "
    for changed, *words in (
        (dict(format=None), other.format(None), "the code that wrote it"),
        (dict(format=2), other.format(2), "the code that wrote it"),
        (dict(model_args=ARGS | dict(n_embd=12)), "size mismatch for wte.weight"),
        (dict(model_args=ARGS | dict(n_heads=2)), "unknown key 'n_heads' (did you mean 'n_head'?)"),
        (dict(model_args=ARGS | dict(n_embd=2**20)), "ckpt.pt: "),  # would take terabytes
    ):
        torch.save({name: value for name, value in make(**changed).items() if value is not None}, file)
        message = helpers.error_of(load_model, file)
        assert all(part in message for part in words), message


WRONG = {
    "an integer": lambda x: x.to(torch.int64), "complex": lambda x: x.to(torch.complex64),
    "meta": lambda x: x.to("meta"), "sparse": torch.Tensor.to_sparse,
    "expanded": lambda x: x[:1, :1].expand(2**40, 8),  # one number, a billion times
}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16, *WRONG], ids=str)
def test_a_weight_of_any_dtype_is_loaded_exactly_or_is_one_line(kind, tmp_path, helpers):
    right = make()["model"]
    weight = WRONG.get(kind, lambda x: x.to(kind))(right["wte.weight"])
    torch.save(make(model=right | {"wte.weight": weight}), tmp_path / "ckpt.pt")
    if kind in WRONG:
        assert "ckpt.pt: its 'wte.weight' is " in helpers.error_of(load, tmp_path)
    else:
        assert torch.equal(load(tmp_path)["model"]["wte.weight"], weight)
        export.main(helpers.words(checkpoint=tmp_path, safetensors=tmp_path / "export"))
        assert torch.equal(load(tmp_path / "export")["model"]["wte.weight"], weight)


def test_what_is_wrong_with_a_checkpoint_is_named_by_every_script_and_nothing_is_touched(text, tmp_path, helpers):
    out, words = tmp_path / "out", helpers.words(checkpoint=tmp_path / "out", device="cpu")
    right = load(helpers.train(text, out, max_iters=1))
    for bad in (torch.nan, torch.inf, -torch.inf, 1e300, None):
        weight = right["model"]["norm.weight"].double()
        weight[3] = bad or 1.0
        iter_num, said = (1, "its 'norm.weight' is not finite") if bad else (-5, "(iter_num=-5: must be")
        torch.save(right | {"iter_num": iter_num, "model": right["model"] | {"norm.weight": weight}}, out / "ckpt.pt")
        before = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
        for call in (
            lambda: export.main([*words[:1], f"--safetensors={tmp_path / 'export'}"]),
            lambda: sample.main([*words, "--max_new_tokens=1"]),
            lambda: evaluate.main(words),
            lambda: helpers.train(text, out, init_from="resume", max_iters=2),
        ):
            assert said in helpers.error_of(call)
        assert {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()} == before


# -- Exports -----------------------------------------------------------------------------------------------------------


def test_an_export_gives_the_same_model_starts_runs(text, tmp_path, helpers, capsys):
    keys = dict(dataset=text, attention="mamba2", gate="elementwise")
    out, exported = helpers.train(**keys, out_dir=tmp_path / "out"), tmp_path / "export"
    export.main(helpers.words(checkpoint=out, safetensors=exported))
    assert {file.name for file in exported.iterdir()} == {".nanogate", "model.safetensors", "config.json"}
    (a, _), (b, about) = (load_model(path) for path in (out, exported))
    idx = torch.arange(20)[None]
    assert torch.equal(a(idx), b(idx)) and about["iter_num"] == 8 and about["data"]["tokenizer"] == "byte"
    assert about["dtype"] == load(out)["dtype"]  # it is read in the run's
    for path in (exported, exported / "model.safetensors"):
        capsys.readouterr()
        again = helpers.train(
            **keys, out_dir=tmp_path / "again", init_from=path, max_iters=1, eval_interval=1, overwrite=True
        )
        taken, of = re.search(rf"starting from {path}: (\d+) of (\d+) tensors taken", capsys.readouterr().out).groups()
        assert taken == of == str(len(a.state_dict()))
        first, last = helpers.metrics(again, "eval")[0], helpers.metrics(out, "eval")[-1]
        assert first["val_loss"] == last["val_loss"]
    (exported / "tokenizer.json").write_text("{}")  # of an older model
    export.main(helpers.words(checkpoint=out, safetensors=exported))  # once more, into its own
    assert not (exported / "tokenizer.json").exists()
    content = bytearray((exported / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (exported / "model.safetensors").write_bytes(content)
    assert "model.safetensors: damaged, or not the file that" in helpers.error_of(load_model, exported)
