"""
Checkpoints: written whole or not at all; loaded without running code, and every damage is one clear line.

    python -m pytest tests/test_checkpoint.py
"""

from configurator import UserError

import json
import os
import pickle
import re
import signal
import sys
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import evaluate
import export
import sample
from model import GPT, GPTConfig
from runs import checkpoint as checkpoints
from runs import huggingface
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
    save(tmp_path / "ckpt.pt", {"model": model.state_dict(), "model_args": args, "iter_num": 7})
    for path in (tmp_path / "ckpt.pt", str(tmp_path)):  # the file, or the out_dir
        loaded, checkpoint = load_model(path)
        assert not loaded.training and checkpoint["iter_num"] == 7
        assert torch.equal(loaded(idx), model.eval()(idx))


def test_a_model_is_loaded_without_its_optimizer(file):
    save(file, make(optimizer={"state": {}}))
    assert "optimizer" not in load_model(file)[1] and "optimizer" in load(file)


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
    assert load(file)["iter_num"] == 7


FULL_DISK = """
import resource, sys, torch
from runs.checkpoint import save
from configurator import run

def main(argv):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    save(argv[0], {"model": {"weight": torch.zeros(100_000)}, "model_args": {}})

run(main)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
def test_a_disk_that_is_full_is_one_line(file, helpers):
    before = file.read_bytes()
    ended = helpers.script("-c", FULL_DISK, file)
    (line,) = ended.stderr.decode().splitlines()
    assert line.startswith(f"error: {file}: cannot write the checkpoint (File too large)")
    assert ended.returncode == 2
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_a_folder_that_is_not_there_is_one_line(tmp_path, helpers):
    assert "No such file or directory" in helpers.error_of(save, tmp_path / "nowhere" / "ckpt.pt", make())


# ----------------------------------------------------------------------------------------------------------------------
# Loading what is no checkpoint


def test_a_missing_file_says_where_checkpoints_come_from(tmp_path, helpers):
    for path in (tmp_path / "ckpt.pt", tmp_path):  # a folder without one, too
        message = helpers.error_of(load, path)
        assert message.startswith(f"{tmp_path / 'ckpt.pt'}: no such checkpoint; train.py writes ckpt.pt and best.pt to")


@pytest.mark.parametrize("content", [b"", b"PK", b"garbage" * 99, pickle.dumps({"model": 1}), b"\x80\x1f." * 9])
def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path, recwarn, helpers, content):
    (tmp_path / "ckpt.pt").write_bytes(content)
    assert helpers.error_of(load, tmp_path).endswith("ckpt.pt: cut short, damaged, or no checkpoint")
    assert not recwarn.list  # torch would warn of a pickle protocol 31


def test_a_zip_that_is_no_checkpoint_is_one_line(tmp_path, helpers):
    with zipfile.ZipFile(tmp_path / "ckpt.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "ckpt.pt: damaged, or no checkpoint (" in helpers.error_of(load, tmp_path)


WHOLE = {}  # the bytes of one checkpoint: hypothesis cannot use a fixture that is made anew for every example


@pytest.fixture(scope="module", autouse=True)
def whole(tmp_path_factory):
    file = tmp_path_factory.mktemp("whole") / "ckpt.pt"
    save(file, make())
    WHOLE["bytes"], WHOLE["file"] = file.read_bytes(), file.with_name("damaged.pt")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1, exclude_max=True))
def test_a_checkpoint_cut_short_anywhere_is_one_line(helpers, share):
    WHOLE["file"].write_bytes(WHOLE["bytes"][: int(share * len(WHOLE["bytes"]))])
    assert "damaged.pt: cut short" in helpers.error_of(load, WHOLE["file"])


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=200, deadline=None)
@given(
    st.integers(-2000, 2000), st.integers(0, 255)
)  # the pickle stands at the start, the table of contents at the end
def test_a_changed_byte_anywhere_raises_nothing_but_one_line(position, byte):
    damaged = bytearray(WHOLE["bytes"])
    damaged[position] = byte
    WHOLE["file"].write_bytes(damaged)
    try:
        load(WHOLE["file"])
    except UserError as error:
        assert str(error).isprintable() and "damaged.pt: " in str(error)


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
        ({"weights": torch.zeros(3)}, "'model' and no 'model_args'"),
        ([1, 2], "'model' and no 'model_args'"),
        ({"model": torch.zeros(3), "model_args": "small"}, "'model' and no 'model_args'"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(tmp_path, helpers, content, lacks):
    torch.save(content, tmp_path / "ckpt.pt")
    assert f"no checkpoint of this project (it has no {lacks})" in helpers.error_of(load, tmp_path)


@pytest.mark.parametrize(
    "number, words",
    [(None, "commit fa2548f reads it"), (0, "the version of the code that wrote it"), (2, "the version of the code")],
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
        (dict(gate="elementwise"), "Missing key(s) in state_dict"),
        (dict(n_heads=2), "unknown key 'n_heads' (did you mean 'n_head'?)"),
        (dict(n_head=3), "n_embd=8: must be a multiple of n_head=3"),
        (dict(attention="mamba9"), "attention='mamba9'"),
        (dict(vocab_size=None), "vocab_size=None"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path, helpers, keys, expected):
    checkpoint = make()
    checkpoint["model_args"] |= keys
    save(tmp_path / "ckpt.pt", checkpoint)
    assert expected in helpers.error_of(load_model, tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# Exports: replaced whole or not at all


@pytest.fixture
def sources(tmp_path):
    """Two runs, "old" with a tokenizer and "new" of another width, and a folder with somebody's notes."""
    for name, width in (("old", 8), ("new", 16)):
        torch.manual_seed(0)
        args = ARGS | dict(n_embd=width, mlp="swiglu")
        (tmp_path / name).mkdir()
        save(tmp_path / name / "ckpt.pt", {"model": GPT(GPTConfig(**args)).state_dict(), "model_args": args})
    (tmp_path / "old" / "tokenizer.json").write_text("{}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.md").write_text("mine")
    return tmp_path


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.name != ".nanogate"}


def export_of(kind, folder, name):
    export.main([f"--checkpoint={folder / name}", f"--{kind}={folder / 'out'}", "--overwrite=true"])


class Killed(BaseException):
    pass


CHANGES = ("replace", "rename", "link", "symlink", "unlink", "rmdir", "mkdir", "fsync")  # functions of os


def test_a_kill_at_any_moment_of_an_export_leaves_the_old_one_or_the_new_one_whole(sources, monkeypatch):
    kind, whole = "to_hf", []
    for name in ("new", "old"):
        export_of(kind, sources, name)
        whole.append(contents(sources / "out"))
    new, old = whole
    assert (
        old.keys() - new.keys() == {"tokenizer.json"} and "notes.md" in new and old["config.json"] != new["config.json"]
    )
    left, found = 0, []
    while not found or left < 0:  # until an export comes to its end
        export_of(kind, sources, "old")
        assert contents(sources / "out") == old
        left = len(found)

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
                export_of(kind, sources, "new")
            except Killed:
                assert left < 0
        found.append([old, new].index(contents(sources / "out")))
    assert len(found) > 30 and found == sorted(found) and found[0] == 0 and found[-1] == 1
    assert {file.name for file in (sources / "out").iterdir()} == new.keys() | {".nanogate"}


KILLED = """
import os, signal, sys
import export
from runs import files

def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)

files.settle, calls = lambda folder: calls.pop()(folder), [kill, lambda folder: None]
export.main(sys.argv[1:])
"""


def test_an_export_whose_process_was_killed_when_all_was_written_loads_and_can_be_replaced(sources, helpers):
    export_of("safetensors", sources, "old")
    words = [f"--checkpoint={sources / 'new'}", f"--safetensors={sources / 'out'}"]
    assert helpers.script("-c", KILLED, *words).returncode == -signal.SIGKILL
    assert (sources / "out" / "config.json").is_symlink()
    assert load_model(sources / "out")[0].config.n_embd == 16 and not (sources / "out" / "tokenizer.json").exists()
    export_of("safetensors", sources, "old")
    names = {"model.safetensors", "config.json", "tokenizer.json", "notes.md", ".nanogate"}
    assert {file.name for file in (sources / "out").iterdir()} == names
    assert not any(file.is_symlink() for file in (sources / "out").iterdir())


def test_of_two_exports_at_once_one_is_refused(sources, helpers, monkeypatch):
    written, seen = huggingface.save_folder, []

    def meanwhile(*args, **keys):
        monkeypatch.setattr(huggingface, "save_folder", written)
        seen.append(helpers.error_of(export_of, "safetensors", sources, "old"))
        seen.append(helpers.error_of(export_of, "to_hf", sources, "old"))
        return written(*args, **keys)

    monkeypatch.setattr(huggingface, "save_folder", meanwhile)
    export_of("to_hf", sources, "new")
    assert [f"process {os.getpid()} on" in line and "is running in it" in line for line in seen] == [True, True]
    assert json.loads((sources / "out" / "config.json").read_text())["hidden_size"] == 16


@pytest.mark.parametrize("kind", ["safetensors", "to_hf"])
@pytest.mark.parametrize("how", ["its folder", "its file", "a link to its folder", "a link to its file"])
def test_an_export_into_the_folder_of_its_checkpoint_is_refused(how, kind, sources, helpers):
    export_of("safetensors", sources, "old")
    out, before = sources / "out", contents(sources / "out")
    checkpoint = out if "folder" in how else out / "model.safetensors"
    if "link" in how:
        (sources / "link.safetensors").symlink_to(checkpoint)
        (sources / "config.json").write_bytes(before["config.json"])
        checkpoint = sources / "link.safetensors"
    words = [f"--checkpoint={checkpoint}", f"--{kind}={out}", "--overwrite=true"]
    assert helpers.error_of(export.main, words) == f"{out}: holds the model that is to be written; name another folder"
    assert contents(out) == before


def test_a_stranger_s_link_in_place_of_the_new_files_is_not_followed(sources, helpers):
    (sources / "elsewhere" / "old").mkdir(parents=True)
    (sources / "elsewhere" / "old" / "mine").write_text("mine")
    (sources / "out" / ".new").symlink_to(sources / "elsewhere")
    assert ".new: is a link" in helpers.error_of(export_of, "safetensors", sources, "new")
    assert [file.name for file in (sources / "elsewhere").rglob("*")] == ["old", "mine"]


def test_what_json_or_transformers_cannot_hold_is_one_line(sources, helpers):
    checkpoint = load(sources / "new")
    for value in (torch.ones(2), float("nan")):
        save(sources / "new" / "ckpt.pt", checkpoint | {"data": {"seen": value}})
        message = helpers.error_of(export_of, "safetensors", sources, "new")
        assert "new/ckpt.pt: no checkpoint of this project (" in message and "JSON" in message
    del checkpoint["model"]["wte.weight"]
    save(sources / "new" / "ckpt.pt", checkpoint)
    assert "its weights are not those of its config" in helpers.error_of(export_of, "to_hf", sources, "new")


# ----------------------------------------------------------------------------------------------------------------------
# Tensors that are no weights, and values that never end

UNSAVED = re.compile(r"torch\.(u?int[1-7]|quint\dx\d)")  # torch saves no tensors of these dtypes
DTYPES = sorted(
    {x for x in vars(torch).values() if isinstance(x, torch.dtype) and not UNSAVED.fullmatch(str(x))}, key=str
)
EXACT = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
VIEWS = {
    "meta": lambda x: x.to("meta"),
    "negative": torch._neg_view,
    "conjugate": lambda x: x.to(torch.complex64).conj(),
    "imaginary": lambda x: x.to(torch.complex64).conj().imag,
    "sparse": torch.Tensor.to_sparse,
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


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory, helpers):
    """The checkpoint of a run that has taken a step."""
    return load(helpers.train(text, tmp_path_factory.mktemp("trained") / "out", max_iters=1))


def users_of(folder, text, helpers):
    """What reads a checkpoint: {script: a call}; the last one replaces it."""
    words = helpers.words(checkpoint=folder, device="cpu")
    return {
        "export": lambda: export.main([*words[:1], f"--safetensors={folder}_export", "--overwrite=true"]),
        "sample": lambda: sample.main([*words, "--max_new_tokens=1"]),
        "evaluate": lambda: evaluate.main(words),
        "resume": lambda: helpers.train(text, folder, init_from="resume", overwrite="true", max_iters=2),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*DTYPES, *VIEWS], ids=str)
def test_a_weight_of_any_dtype_is_loaded_exactly_or_is_one_line(kind, trained, text, tmp_path, helpers, capsys):
    weight = made(kind, trained["model"]["norm.weight"])
    torch.save(trained | {"model": trained["model"] | {"norm.weight": weight}}, tmp_path / "ckpt.pt")
    for call in users_of(tmp_path, text, helpers).values():
        if kind in EXACT:
            call()
        else:
            assert "ckpt.pt: its 'norm.weight' is " in helpers.error_of(call)
    if kind in EXACT:
        assert torch.equal(load(f"{tmp_path}_export")["model"]["norm.weight"], weight)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*DTYPES, *VIEWS], ids=str)
@pytest.mark.parametrize("part", ["exp_avg", "exp_avg_sq", "step"])
def test_an_optimizers_tensor_of_any_dtype_goes_on_or_is_one_line(part, kind, trained, text, tmp_path, helpers):
    state = trained["optimizer"]["state"]
    optimizer = trained["optimizer"] | {
        "state": state | {"wte.weight": state["wte.weight"] | {part: made(kind, state["wte.weight"][part])}}
    }
    torch.save(trained | {"optimizer": optimizer}, tmp_path / "ckpt.pt")
    if kind in EXACT:
        helpers.train(text, tmp_path, init_from="resume", overwrite="true", max_iters=2)
    else:
        message = helpers.error_of(helpers.train, text, tmp_path, init_from="resume", overwrite="true", max_iters=2)
        assert f"its optimizer's {part} of wte.weight is " in message


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e300])
@pytest.mark.parametrize("name", ["wte.weight", "blocks.1.mixer.qkv.weight", "norm.weight"])
def test_a_weight_that_is_not_finite_is_named_by_every_script(name, bad, trained, text, tmp_path, helpers):
    weight = trained["model"][name].double()
    weight.view(-1)[3] = bad
    torch.save(trained | {"model": trained["model"] | {name: weight}}, tmp_path / "ckpt.pt")
    for call in users_of(tmp_path, text, helpers).values():
        assert f"its {name!r} is not finite" in helpers.error_of(call)


def test_an_optimizers_number_that_is_not_finite_is_named(trained, text, tmp_path, helpers):
    state = trained["optimizer"]["state"]
    name = list(state)[1]
    bad = torch.full_like(state[name]["exp_avg"], torch.nan)
    optimizer = trained["optimizer"] | {"state": state | {name: state[name] | {"exp_avg": bad}}}
    torch.save(trained | {"optimizer": optimizer}, tmp_path / "ckpt.pt")
    message = helpers.error_of(helpers.train, text, tmp_path, init_from="resume", overwrite="true", max_iters=2)
    assert "is not finite" in message and "its optimizer's exp_avg of " in message


@pytest.mark.parametrize("name", ["model_args", "data"])
@pytest.mark.parametrize("value", [torch.zeros(2), torch.nan, 1j, {1, 2}], ids=str)
def test_what_no_json_could_hold_is_refused_where_an_export_would_write_it(name, value, trained, tmp_path, helpers):
    torch.save(trained | {name: trained[name] | {"extra": value}}, tmp_path / "ckpt.pt")
    assert "no checkpoint of this project" in helpers.error_of(load, tmp_path)
