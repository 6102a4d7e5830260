"""The prepare scripts: what MQAR rows are, which files of a text are taken, what Python's standard library is."""

import functools
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import urllib.request

import numpy as np
import pytest
from conftest import ROOT, Helpers
from test_data import documents_of

from base.files import sha256_of_file
from data import writing
from data.hub import prepare as hub
from data.mqar import prepare as mqar
from data.pystdlib import prepare as pystdlib
from data.shakespeare_char import prepare as shakespeare
from data.shards import open_dataset
from data.text import prepare as text
from data.tokenizer import ByteTokenizer

error_of = Helpers.error_of
# 99.9% quantiles of chi-square by degrees of freedom. The seeds are fixed: these tests do not fail by chance.
CHI2 = {29: 58.3, 41: 74.7}


def chi2(observed, expected):
    assert observed.sum() == pytest.approx(expected.sum())
    return ((observed - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_slots_are_drawn_as_i_to_the_power_minus_1_without_replacement_in_the_order_of_the_pairs(power):
    examples = mqar.generate(np.random.default_rng(2), 30_000, mqar.Config(power=power), 16, 2).astype(int)
    slots = []
    for pair in (0, 1):  # where the key of this pair is asked for
        slots.append((examples[:, 0, 4:] == examples[:, 0, [2 * pair]]).argmax(1) // 2)
    p = np.arange(1, 7) ** (power - 1)
    p = p / p.sum()
    ordered = list(itertools.permutations(range(6), 2))
    law = np.array([p[i] * p[j] / (1 - p[i]) for i, j in ordered])
    seen = np.bincount(slots[0] * 6 + slots[1], minlength=36)
    assert chi2(np.array([seen[i * 6 + j] for i, j in ordered]), 30_000 * law) < CHI2[29]


def test_keys_are_uniform():
    config = mqar.Config(vocab_size=16, power=1.0)
    examples = mqar.generate(np.random.default_rng(3), 30_000, config, 20, 4).astype(int)
    keys = examples[:, 0, 0] * 16 + examples[:, 0, 2]
    ordered = [i * 16 + j for i, j in itertools.permutations(range(1, 8), 2)]
    assert chi2(np.bincount(keys, minlength=256)[ordered], np.full(42, 30_000 / 42)) < CHI2[41]


def test_a_validation_row_is_never_a_training_row():
    # 2 keys, 3 values, 3 slots: 18 rows are possible
    config = mqar.Config(train_size=8, val_size=50, slices=["8/1"], vocab_size=6)
    splits = mqar.generate_splits(config)
    ((train, _),), ((val, _),) = splits["train"], splits["val"]
    first_draw = mqar.generate(np.random.default_rng([0, 1, 8, 1]), 50, config, 8, 1)
    seen = {row.tobytes() for row in train}
    assert any(row.tobytes() in seen for row in first_draw)  # or this test would show nothing
    assert not any(row.tobytes() in seen for row in val)
    config.train_size = 2000
    assert "so few rows are possible" in error_of(mqar.generate_splits, config)


def test_a_seed_is_the_bytes_of_every_file(tmp_path):
    def files(folder, seed, slices="16/2,32/4"):
        sizes = dict(train_size=1100, val_size=20, vocab_size=64, out_dir=tmp_path / folder)
        mqar.main(Helpers.words(slices=slices, seed=seed, **sizes))
        return {file.name: file.read_bytes() for file in (tmp_path / folder).glob("[!.]*")}

    first, second, third, alone = files("a", 0), files("b", 0), files("c", 1), files("d", 0, "32/4")
    assert set(first) == {"meta.json", *(f"{split}_000{i}.npy" for split in ("train", "val") for i in (0, 1))}
    assert first == second and all(first[name] != third[name] for name in first)
    assert alone["train_0000.npy"] == first["train_0001.npy"]  # a slice is the same beside others
    dataset = open_dataset(tmp_path / "a")
    assert dataset.sha256[:16] == "ce6546753d1f789d"  # rows of results name it
    assert (dataset.slices, dataset.kind, dataset.tokenizer) == (["16/2", "32/4"], "examples", "mqar")
    assert dataset.counts("val") == {"rows": 40, "tokens": 20 * 48, "labels": 20 * 6}


IMPOSSIBLE = ["--slices=64/4,15/2", "--slices=10/4", "--vocab_size=8", "--slices=64/40"]
IMPOSSIBLE = dict.fromkeys(IMPOSSIBLE, "needs an even length, and 1 to ") | {
    "--slices=64": "write length/pairs",
    "--slices=64/4,64/4": "each once",
    "--slices=": "name some",
}


@pytest.mark.parametrize("words", IMPOSSIBLE)
def test_an_impossible_slice_is_refused_with_the_reason(words, tmp_path):
    assert IMPOSSIBLE[words] in error_of(mqar.main, [*words.split(), f"--out_dir={tmp_path}"])
    assert not list(tmp_path.iterdir())


# -- A second data set in a folder -------------------------------------------------------------------------------------


def small_mqar(out_dir, **keys):
    mqar.main(Helpers.words(**dict(train_size=20, val_size=5, vocab_size=64, out_dir=out_dir) | keys))


def test_another_data_set_in_the_folder_is_refused_by_what_differs_and_the_same_one_is_made_again(tmp_path):
    small_mqar(tmp_path)
    before = open_dataset(tmp_path).sha256
    message = error_of(small_mqar, tmp_path, vocab_size=128, seed=1)
    assert message.startswith(f"{tmp_path}: holds another data set (another seed, vocab_size); name another --out_dir")
    (tmp_path / "a.txt").write_text("a\nb\n")
    message = error_of(text.main, [str(tmp_path / "a.txt"), f"--out_dir={tmp_path}"])
    assert "(another generator, " in message
    assert open_dataset(tmp_path).sha256 == before
    small_mqar(tmp_path)
    small_mqar(tmp_path, vocab_size=128, overwrite="true")
    assert open_dataset(tmp_path).vocab_size == 128


def test_a_data_set_of_another_version_of_the_script_is_another_one(tmp_path, monkeypatch):
    small_mqar(tmp_path)
    monkeypatch.setattr(mqar, "VERSION", mqar.VERSION + 1)
    assert "(another generator_version)" in error_of(small_mqar, tmp_path)


def test_the_default_folder_of_a_script_is_guarded_too(tmp_path, monkeypatch):
    (tmp_path / "data" / "mqar").mkdir(parents=True)
    (tmp_path / "data" / "mqar" / "prepare.py").write_text("")
    monkeypatch.setattr(writing, "DATA", tmp_path / "data")
    words = ["--train_size=20", "--val_size=5"]
    mqar.main(words)
    assert "(another vocab_size)" in error_of(mqar.main, [*words, "--vocab_size=256"])


def test_a_meta_json_that_cannot_be_read_does_not_keep_the_data_from_being_made_again(tmp_path):
    small_mqar(tmp_path)
    for content in ("", "[]", '{"parameters": 3}'):
        (tmp_path / "meta.json").write_text(content)
        small_mqar(tmp_path)
        assert open_dataset(tmp_path).vocab_size == 64


@pytest.mark.parametrize("script", sorted((ROOT / "data").glob("*/prepare.py")), ids=lambda file: file.parent.name)
def test_every_prepare_script_has_the_key_overwrite(script):
    module = importlib.import_module(f"data.{script.parent.name}.prepare")
    assert issubclass(module.Config, writing.Output) and module.Config().overwrite is False


# -- Text --------------------------------------------------------------------------------------------------------------


def write(folder, sources):
    for name, content in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Writes {path: text} as the standard library, and returns {split: documents} of what prepare.py makes of it."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))

    def make(sources, **keys):
        write(tmp_path / "lib", sources)
        out = tmp_path / "-".join(map(str, ("out", *keys.values())))
        pystdlib.main(Helpers.words(out_dir=out, **keys))
        return documents_of(out)

    return make


def code(name, lines=8):
    return "".join(f"def {name}_{i}(x):\n    return x + {i}\n" for i in range(lines // 2))


def test_tests_packages_tables_generated_files_and_near_duplicates_are_left_out(library):
    kept = {f"{name}.py": code(name, 20) for name in "abcdef"} | {"a/z.py": "é\r\n", "h/h.py": code("h", 20)}
    kept["h/half.py"] = kept["h/h.py"][:160] + code("g", 14)  # less than half of it stands in the file before
    left_out = {
        "encodings/latin.py": code("latin"),
        "entities.py": "x = {\n" + "".join(f"    'e{i}': {i},\n" for i in range(9)) + "}\n",
        "config-3/made.py": code("made"),
        "token.py": '"""Tokens."""\n# Auto-generated by x.py\n' + code("token"),
        "z/copy.py": kept["h/h.py"].replace("    ", "\t").replace("h_1(x)", "h_1(y)") + "\n\n",
    }
    not_read = ["test/a.py", "x/tests/a.py", "site-packages/a.py", "_sysconfigdata_x.py", "a.txt"]
    found = library(kept | left_out | dict.fromkeys(not_read, "no") | {"empty.py": "", "latin.py": b"\xe9"})
    assert sorted(found["train"] + found["val"]) == sorted(text.encode() for text in kept.values())


def test_a_file_of_which_half_stands_in_others_is_kept_and_one_of_which_more_does_is_not():
    texts = {"a.py": "abcde", "half.py": "abcdz", "more.py": "abcdez"}  # lines of one letter
    assert list(pystdlib.clean({path: "\n".join(text) for path, text in texts.items()})) == ["a.py", "half.py"]


def test_validation_is_whole_packages_the_same_for_every_seed_which_orders_the_training_files(library):
    sources = {f"m{i:02}.py": code(f"m{i}", 10) for i in range(40)}
    sources |= {f"package/{name}.py": code(name, 10) for name in "abc"} | {"large.py": code("large", 90)}
    found = [library(sources, val_fraction=0.2, seed=seed) for seed in (0, 1, 2)]
    train, val = found[0]["train"], found[0]["val"]
    assert all(other["val"] == val and {*other["train"]} == {*train} for other in found)
    assert len({tuple(other["train"]) for other in found}) == 3
    assert sorted(train + val) == sorted(text.encode() for text in sources.values())
    room = 0.2 * sum(map(len, train + val))
    assert 0.9 * room < sum(map(len, val)) <= room and sources["large.py"].encode() not in val  # over a sixth of it
    assert sum(sources[f"package/{name}.py"].encode() in val for name in "abc") in (0, 3)


def test_most_bytes_takes_the_first_training_files_beside_a_smaller_validation(library):
    sources = {f"{i:02}.py": bytes([65 + i]) * (10 + i) for i in range(40)}
    keys = dict(val_fraction=0.4, most_bytes=600)
    whole, first, other = library(sources, val_fraction=0.4), library(sources, **keys), library(sources, seed=1, **keys)
    size = sum(map(len, first["train"] + first["val"]))
    assert 590 < size <= 600 and 0 < sum(map(len, first["val"])) <= 240 and {*first["val"]} <= {*whole["val"]}
    assert other["val"] == first["val"] and {*other["train"]} != {*first["train"]}


def test_tinyshakespeare_is_checked_and_split_as_nanogpt_s_whether_downloaded_or_copied(tmp_path, monkeypatch):
    book, copy, out = b"First Citizen:\n" * 7, tmp_path / "input.txt", f"--out_dir={tmp_path / 'out'}"
    copy.write_bytes(book)
    assert "input.txt: is not tinyshakespeare" in error_of(shakespeare.main, [f"--from_file={copy}", out])
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(book).hexdigest())
    for words in ([f"--from_file={copy}"], []):
        shakespeare.main([*words, out])
        assert documents_of(tmp_path / "out") == {"train": [book[:94]], "val": [book[94:]]}
        monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: open(copy, "rb"))
    copy.unlink()
    assert "cannot be downloaded" in error_of(shakespeare.main, [out])


@pytest.mark.parametrize(
    ("parts", "fraction"),
    [
        (("".join(f"line {i}\r\n" for i in range(90)), "".join(f"line {i}\r\n" for i in range(10, 20))), 0.1),
        (("a line\n", "b\n \n\n\n\n\n"), 0.05),
        (("\n\na\n", "b" * 99), 0.5),
    ],
)
def test_one_file_is_split_at_the_border_of_its_lines_and_no_part_is_blank(parts, fraction, tmp_path):
    (tmp_path / "book.txt").write_bytes("".join(parts).encode())
    text.main([str(tmp_path / "book.txt"), f"--out_dir={tmp_path / 'out'}", f"--val_fraction={fraction}"])
    assert documents_of(tmp_path / "out") == {"train": [parts[0].encode()], "val": [parts[1].encode()]}


def test_folders_and_linked_ones_are_searched_once_and_blank_and_hidden_files_are_left_out(tmp_path):
    names = "n/.ipynb_checkpoints/b.md n/._b.md n/sub/a.txt n/c.rst elsewhere/e.md d.log".split()
    marked = {"n/b.md": "\ufeffn/b.md", "n/blank.md": "\ufeff \n", "n/blank_too.md": " \n"}
    write(tmp_path, {name: name for name in names} | marked)
    (tmp_path / "n" / "link.md").symlink_to(tmp_path / "d.log")
    (tmp_path / "n" / "more").symlink_to(tmp_path / "elsewhere")
    paths = [str(tmp_path / name) for name in ("d.log", "n", "n/b.md")]
    text.main([*paths, "--ext=.rst,.md", "--val_fraction=0.4", f"--out_dir={tmp_path / 'out'}"])
    found = documents_of(tmp_path / "out")
    assert sorted(found["train"] + found["val"]) == [b"d.log", b"elsewhere/e.md", b"n/b.md", b"n/c.rst"]


def test_files_named_for_validation_are_the_validation_and_are_not_trained_on(tmp_path):
    write(tmp_path, {name: name for name in ("n/a.md", "n/b.md", "c.md")})
    out = f"--out_dir={tmp_path / 'out'}"
    text.main([str(tmp_path / "n"), f"--val={tmp_path / 'n' / 'b.md'},{tmp_path / 'c.md'}", out])
    assert documents_of(tmp_path / "out") == {"train": [b"n/a.md"], "val": [b"c.md", b"n/b.md"]}
    words = [str(tmp_path / "c.md"), f"--val={tmp_path}", f"--out_dir={tmp_path / 'none'}"]
    assert "leaves no file for training" in error_of(text.main, words)


# -- A call that was stopped -------------------------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")  # torch is imported once
DOCUMENTS = [f"Document {i} of {'many ' * (i % 90)}words, é.\n" for i in range(400)]


def prepare(script, source, out, *words):
    """The files that a script makes of a text, in shards of 1,000 tokens, and how many documents it encoded."""
    encoded, encode = [], ByteTokenizer.encode_array
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "write_stream", functools.partial(writing.write_stream, shard_tokens=1000))
        patch.setattr(ByteTokenizer, "encode_array", lambda *about: [encoded.append(1), encode(*about)][1])
        script.main([str(source), f"--out_dir={out}", "--val_fraction=0.3", "--tokenizer=byte", *words])
    assert not (out / ".new").exists()
    return {file.name: sha256_of_file(file) for file in out.glob("[!.]*")}, len(encoded)


def prepare_and_die(call, nth, *about):
    """Kills this process where it calls os.replace (of progress) or hashes a file (a new shard) for the nth time."""
    module, name = {"progress": (os, "replace"), "shard": (writing.files, "sha256_of_file")}[call]
    function, calls = getattr(module, name), []

    def kill(*words):
        calls.append(1)
        if len(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*words)

    setattr(module, name, kill)
    prepare(*about)


def killed(*about):
    process = FORK.Process(target=prepare_and_die, args=about)
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture
def sources(tmp_path):
    """{script: its text}"""
    write(tmp_path, {f"n/{i:03}.txt": document for i, document in enumerate(DOCUMENTS)})
    (tmp_path / "copy").mkdir()
    rows = "".join(f"{json.dumps({'text': document})}\n" for document in DOCUMENTS)
    (tmp_path / "copy" / "train.jsonl").write_text(rows)
    return {text: tmp_path / "n", hub: tmp_path / "copy"}


@pytest.mark.parametrize("script", [text, hub], ids=["text", "hub"])
def test_a_script_killed_again_and_again_goes_on_at_a_shard_and_makes_the_same_files(script, sources, tmp_path):
    whole, every = prepare(script, sources[script], tmp_path / "whole")
    out = tmp_path / "out"
    for call, nth in [("shard", 1), ("progress", 4), ("shard", 30), ("progress", 30), ("shard", 75)]:
        killed(call, nth, script, sources[script], out)
        assert not (out / "meta.json").exists()
    files, encoded = prepare(script, sources[script], out, "--threads=3")
    assert files == whole and 0 < encoded < every / 3
    assert prepare(script, sources[script], out) == (whole, every)  # a whole one is made again


def test_only_the_same_call_on_the_same_text_goes_on(sources, tmp_path):
    source, out = sources[text], tmp_path / "out"
    killed("progress", 20, text, source, out)
    (out / ".new" / "train_0003.npy").write_bytes(b"damaged")
    other, every = prepare(text, source, tmp_path / "other", "--seed=5")
    killed("progress", 20, text, source, out)  # from the beginning
    assert prepare(text, source, out, "--seed=5") == (other, every)
    killed("progress", 20, text, source, out, "--overwrite=true")
    for file in source.iterdir():
        file.write_text(file.read_text().replace("Document", "document"))
    message = error_of(prepare, text, source, out, "--overwrite=true")
    assert f"{out / '.new'}: holds the first shards of another text" in message
    shutil.rmtree(out / ".new")
    assert prepare(text, source, out, "--overwrite=true")[1] == every


def test_a_bar_in_a_log_file_is_lines_with_the_total_and_the_time_left(sources, tmp_path, capfd):
    prepare(hub, sources[hub], tmp_path / "out", "--documents=300")
    said = capfd.readouterr().err
    assert re.search(r"^train: +0%\|.*\| 0/300 \[", said, re.M) and re.search("^val: 100%", said, re.M)
    assert "\r" not in said and "\n\n" not in said
    with writing.bar("train", 4) as bar:
        bar.update()
        bar.start_t -= 60
        bar.refresh()
    assert bar.mininterval == 30 and re.search(r"^train:  25%.*1/4 \[01:00<03:0", capfd.readouterr().err, re.M)
