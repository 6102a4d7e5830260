"""
Checkpoints: written whole or not at all; loaded without running code, and every damage is one clear line. Exports.

    python -m pytest tests/test_checkpoint.py
"""

from configurator import UserError

import hashlib
import json
import os
import pickle
import re
import resource
import sys
import zipfile

import pytest
import torch

import evaluate
import export
import sample
from model import GPT, GPTConfig
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


# ----------------------------------------------------------------------------------------------------------------------
# Saving


def test_a_loaded_model_gives_the_logits_of_the_saved_one(tmp_path):
    torch.manual_seed(0)
    args = ARGS | dict(attention="softmax,cosformer", gate="elementwise,none", n_layer=2, dropout=0.5, short_conv=3)
    model, idx = GPT(GPTConfig(**args)), torch.randint(11, (3, 16))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    save(tmp_path / "ckpt.pt", make(model=model.state_dict(), model_args=args, optimizer={"state": {}}))
    for path in (tmp_path / "ckpt.pt", str(tmp_path)):  # the file, or the out_dir
        loaded, checkpoint = load_model(path)
        assert not loaded.training and checkpoint["iter_num"] == 7 and "optimizer" not in checkpoint
        assert torch.equal(loaded(idx), model.eval()(idx))


@pytest.mark.parametrize("where", ["torch.load", "model.GPT.load_state_dict"])
def test_a_shortage_of_memory_is_no_damage(file, monkeypatch, where):
    def fail(*args, **keys):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")

    monkeypatch.setattr(where, fail)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_model(file)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("pos"), KeyboardInterrupt()])
def test_a_save_that_dies_midway_leaves_the_old_checkpoint_and_no_other_file(file, monkeypatch, error):
    before = file.read_bytes()

    def half(checkpoint, out):
        out.write(before[: len(before) // 2])
        raise error

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UserError):
        save(file, make())
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_a_disk_that_is_full_and_a_folder_that_is_missing_are_one_line(file, helpers):
    before, (soft, hard) = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        message = helpers.error_of(save, file, make(model={"weight": torch.zeros(100_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message.startswith(f"{file}: cannot be written (") and "File too large" in message
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]
    assert "No such file or directory" in helpers.error_of(save, file.parent / "nowhere" / "ckpt.pt", make())


# ----------------------------------------------------------------------------------------------------------------------
# Loading what is no checkpoint


def test_a_missing_file_says_where_checkpoints_come_from(tmp_path, helpers):
    for path in (tmp_path / "ckpt.pt", tmp_path):  # a folder without one, too
        message = helpers.error_of(load, path)
        assert message.startswith(f"{tmp_path / 'ckpt.pt'}: no such checkpoint; train.py writes ckpt.pt and best.pt to")


def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path, recwarn, helpers):
    for content in (b"", b"PK", b"garbage" * 99, pickle.dumps({"model": 1}), b"\x80\x1f." * 9):
        (tmp_path / "ckpt.pt").write_bytes(content)
        assert helpers.error_of(load, tmp_path).endswith("ckpt.pt: cut short, damaged, or no checkpoint")
    assert not recwarn.list  # torch would warn of a pickle protocol 31
    with zipfile.ZipFile(tmp_path / "ckpt.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "ckpt.pt: damaged, or no checkpoint (" in helpers.error_of(load, tmp_path)


def test_every_flipped_bit_of_a_tensor_is_found(file, helpers):
    content, weight = file.read_bytes(), load(file)["model"]["norm.weight"].numpy().tobytes()
    begin = content.index(weight)
    for bit in range(8 * len(weight)):
        damaged = bytearray(content)
        damaged[begin + bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert "damaged, the checksum of" in helpers.error_of(load, file)


class Malicious:
    """What makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("where", ["model", "extra"])
def test_a_checkpoint_that_would_run_code_is_refused_and_does_not(tmp_path, helpers, where):
    torch.save(make() | {where: Malicious(tmp_path / "made")}, tmp_path / "ckpt.pt")
    assert "refused, it is damaged or holds more than tensors and plain values" in helpers.error_of(load, tmp_path)
    assert not (tmp_path / "made").exists()
    torch.load(tmp_path / "ckpt.pt", weights_only=False)  # with the one wrong flag it would have
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content, lacks",
    [
        ({"model_args": ARGS}, "'model'"),
        ({"model": {}}, "'model_args'"),
        ([1, 2], "'model' and no 'model_args'"),
        ({"model": torch.zeros(3), "model_args": "small"}, "'model' and no 'model_args'"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(tmp_path, helpers, content, lacks):
    torch.save(content, tmp_path / "ckpt.pt")
    assert f"no checkpoint of this project (it has no {lacks})" in helpers.error_of(load, tmp_path)


@pytest.mark.parametrize(
    "number, words", [(None, "commit fa2548f reads it"), (2, "the version of the code that wrote it")]
)
def test_a_checkpoint_or_an_export_of_another_format_is_refused_with_what_reads_it(
    file, tmp_path, helpers, number, words
):
    export.export(file, tmp_path / "out")
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert load(file)["format"] == load(tmp_path / "out")["format"] == about.pop("format") == checkpoints.FORMAT
    changed = {} if number is None else {"format": number}
    torch.save({name: value for name, value in make().items() if name != "format"} | changed, file)
    (tmp_path / "out" / "config.json").write_text(json.dumps(about | changed))
    for path in (file, tmp_path / "out"):
        message = helpers.error_of(load_model, path)
        assert f"its format is {number}, and this version reads 1 alone: " in message and words in message


@pytest.mark.parametrize(
    "keys, expected",
    [
        (dict(n_embd=12), "size mismatch for wte.weight"),
        (dict(n_layer=2), "Missing key(s) in state_dict"),
        (dict(n_heads=2), "unknown key 'n_heads' (did you mean 'n_head'?)"),
        (dict(attention="mamba9"), "attention='mamba9'"),
        (dict(vocab_size=None), "vocab_size=None"),
        (dict(n_layer=10**9), "n_layer=1000000000"),  # would take terabytes, or for ever
        *((dict([pair]), "ckpt.pt: ") for pair in dict(head_dim=2**30, mlp_ratio=1e9, n_embd=2**20).items()),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path, helpers, keys, expected):
    save(tmp_path / "ckpt.pt", make(model_args=ARGS | keys))
    assert expected in helpers.error_of(load_model, tmp_path / "ckpt.pt")


# ----------------------------------------------------------------------------------------------------------------------
# Fields and tensors that are none

FIELDS = {
    "iter_num": [-5, True, 2**70, "3", None, [3], 3.0],
    "best_val_loss": ["low", torch.nan, [], 10**400, True],
    "seconds": [torch.nan, -1.0, "x", torch.inf],
    "eval_seconds": [torch.nan, -1.0, "x"],
    "dtype": ["float13", 32, ["float32"]],
    "rng": [torch.zeros(3, dtype=torch.uint8), torch.zeros(5056), "x", [1] * 5056, None],
    "run_id": [7, "x" * 5000],
    "model_args": [[], 3],
    "config": [[], {3: 1}, "x"],
    "optimizer": [[], 3],
    "versions": [3, {"torch": 2}],
}
OF_DATA = dict(path=["x" * 5000, 3], tokenizer=[["byte"]], sha256=[1], name=[{}], vocab_size=[-1], first_ids=[0, [-1]])
FIELDS["data"] = [[], *({name: value} for name, values in OF_DATA.items() for value in values)]


def test_a_field_of_a_checkpoint_that_is_not_what_it_should_be_is_named(tmp_path, helpers):
    for name, values in FIELDS.items():
        for value in values:
            torch.save(make(**{name: value}), tmp_path / "ckpt.pt")
            message = helpers.error_of(load, tmp_path)
            assert "no checkpoint of this project" in message and name in message, (name, value)
    for name in ("model_args", "data"):  # an export would write them as JSON
        for value in (torch.zeros(2), torch.nan, 1j, {1, 2}):
            torch.save(make(**{name: make().get(name, {}) | {"extra": value}}), tmp_path / "ckpt.pt")
            assert "no checkpoint of this project" in helpers.error_of(load, tmp_path)


UNSAVED = re.compile(r"torch\.(u?int[1-7]|quint\dx\d)")  # torch saves no tensors of these dtypes
DTYPES = {x for x in vars(torch).values() if isinstance(x, torch.dtype) and not UNSAVED.fullmatch(str(x))}
EXACT = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
VIEWS = {
    "meta": lambda x: x.to("meta"),
    "negative": torch._neg_view,
    "conjugate": lambda x: x.to(torch.complex64).conj(),
    "imaginary": lambda x: x.to(torch.complex64).conj().imag,
    "sparse": torch.Tensor.to_sparse,
    "expanded": lambda x: x[:1, :1].expand(2**40, 8),  # one number, a billion times
}


def made(kind, x):
    """x as a tensor of this dtype or as one of the VIEWS."""
    if kind in VIEWS:
        return VIEWS[kind](x)
    if kind in (torch.quint8, torch.qint8, torch.qint32):
        return torch.quantize_per_tensor(x, 0.1, 0, kind)
    try:
        return x.to(kind)
    except (RuntimeError, NotImplementedError):  # dtypes of packed bits have no arithmetic
        return torch.empty(x.shape, dtype=kind)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*sorted(DTYPES, key=str), *VIEWS], ids=str)
def test_a_weight_of_any_dtype_is_loaded_exactly_or_is_one_line(kind, tmp_path, helpers):
    right = make()["model"]
    weight = made(kind, right["wte.weight"])
    torch.save(make(model=right | {"wte.weight": weight}), tmp_path / "ckpt.pt")
    if kind in EXACT:
        assert torch.equal(load(tmp_path)["model"]["wte.weight"], weight)
        export.export(tmp_path, tmp_path / "export")
        assert torch.equal(load(tmp_path / "export")["model"]["wte.weight"], weight)
    else:
        assert "ckpt.pt: its 'wte.weight' is " in helpers.error_of(load, tmp_path)


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


# ----------------------------------------------------------------------------------------------------------------------
# Exports


def test_an_export_gives_the_same_model_and_starts_runs(text, tmp_path, helpers, capsys):
    keys = dict(dataset=text, attention="mamba2", gate="elementwise")
    out, exported = helpers.train(**keys, out_dir=tmp_path / "out"), tmp_path / "export"
    export.main(helpers.words(checkpoint=out, safetensors=exported))
    assert {file.name for file in exported.iterdir()} == {".nanogate", "model.safetensors", "config.json"}
    (a, _), (b, about) = (load_model(path) for path in (out, exported))
    idx = torch.arange(20)[None]
    assert torch.equal(a(idx), b(idx)) and about["iter_num"] == 8 and about["data"]["tokenizer"] == "byte"
    for path in (exported, exported / "model.safetensors"):
        capsys.readouterr()
        again = helpers.train(**keys, out_dir=tmp_path / "again", init_from=path, max_iters=1, overwrite=True)
        taken, of = re.search(rf"starting from {path}: (\d+) of (\d+) tensors taken", capsys.readouterr().out).groups()
        assert taken == of == str(len(a.state_dict()))
        first, last = helpers.metrics(again, "eval")[0], helpers.metrics(out, "eval")[-1]
        assert first["val_loss"] == last["val_loss"]
    export.export(out, exported)  # once more, into its own
    content = bytearray((exported / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (exported / "model.safetensors").write_bytes(content)
    assert "model.safetensors: damaged, or not the file that" in helpers.error_of(load_model, exported)


def test_an_export_without_safetensors_is_refused(file, tmp_path, helpers, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    message = helpers.error_of(export.export, file, tmp_path / "export")
    assert message == "safetensors is not installed: pip install safetensors"


def test_an_export_brings_the_tokenizer_of_the_data_if_it_is_still_the_one_of_the_run(tmp_path, helpers):
    (tmp_path / "tokenizer.json").write_text("{}")
    about = {"path": str(tmp_path), "tokenizer": f"tokenizer.json {hashlib.sha256(b'{}').hexdigest()[:16]}"}
    args = ARGS | {"mlp": "swiglu"}
    (tmp_path / "run").mkdir()
    save(tmp_path / "run" / "ckpt.pt", make(model=GPT(GPTConfig(**args)).state_dict(), model_args=args, data=about))
    export.main(helpers.words(checkpoint=tmp_path / "run", safetensors=tmp_path / "export"))
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "{}"
    (tmp_path / "tokenizer.json").write_text("[]")  # of other data, which were written there since
    export.main(helpers.words(checkpoint=tmp_path / "run", safetensors=tmp_path / "other"))
    assert not (tmp_path / "other" / "tokenizer.json").exists()


@pytest.fixture
def sources(tmp_path):
    """Two runs, "old" with a tokenizer and "new" of another width, and a folder with somebody's notes."""
    for name, width in (("old", 8), ("new", 16)):
        args = ARGS | dict(n_embd=width, mlp="swiglu")
        (tmp_path / name).mkdir()
        save(tmp_path / name / "ckpt.pt", make(model=GPT(GPTConfig(**args)).state_dict(), model_args=args))
    (tmp_path / "old" / "tokenizer.json").write_text("{}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.md").write_text("mine")
    return tmp_path


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.name != ".nanogate"}


def export_of(folder, name):
    export.main([f"--checkpoint={folder / name}", f"--safetensors={folder / 'out'}", "--overwrite=true"])


class Killed(BaseException):
    pass


CHANGES = ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync")  # functions of os


def test_a_kill_at_any_moment_of_an_export_leaves_the_old_one_the_new_one_or_none(sources, monkeypatch):
    whole = []
    for name in ("new", "old"):
        export_of(sources, name)
        whole.append(contents(sources / "out"))
    new, old = whole
    assert old.keys() - new.keys() == {"tokenizer.json"} and "notes.md" in new
    left, seen = 0, []
    while True:  # until an export comes to its end
        export_of(sources, "old")
        assert contents(sources / "out") == old
        left = len(seen)

        def counted(function):
            def change(*args, **keys):
                nonlocal left
                left -= 1
                if left < 0:  # a process that was killed changes nothing more
                    raise Killed
                return function(*args, **keys)

            return change

        with monkeypatch.context() as patched:
            for name in CHANGES:
                patched.setattr(os, name, counted(getattr(os, name)))
            try:
                export_of(sources, "new")
            except Killed:
                assert left < 0
            else:
                break
        now = contents(sources / "out")
        seen.append("refused" if "config.json" not in now else ["old", "new"][[old, new].index(now)])
    assert len(seen) > 15 and {"old", "refused", "new"} == set(seen)
    assert seen == sorted(seen, key=["old", "refused", "new"].index)
    assert contents(sources / "out") == new


@pytest.mark.parametrize("how", ["its folder", "a link to its file"])
def test_an_export_into_the_folder_of_its_checkpoint_is_refused(how, sources, helpers):
    export_of(sources, "old")
    out, before = sources / "out", contents(sources / "out")
    checkpoint = out if "folder" in how else out / "model.safetensors"
    if "link" in how:
        (sources / "link.safetensors").symlink_to(checkpoint)
        (sources / "config.json").write_bytes(before["config.json"])
        checkpoint = sources / "link.safetensors"
    words = [f"--checkpoint={checkpoint}", f"--safetensors={out}", "--overwrite=true"]
    assert helpers.error_of(export.main, words) == f"{out}: holds the model that is to be written; name another folder"
    assert contents(out) == before
