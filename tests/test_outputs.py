"""What a script may write over: an output replaces nothing but an older one of its kind, and no link is followed."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from conftest import ROOT
from made_rows import listed, rows_of, show, write_rows

import bench
import evaluate
import experiment
import meters
import plot
from base import files
from base.configurator import UserError
from data.mqar import prepare as mqar_prepare
from data.text import prepare as text_prepare
from hub import export
from runs import checkpoint as checkpoints
from runs import outdir
from study import drawing, report, runner, token_page

LINKED = "linked"  # what a link of the victims leads to


@pytest.fixture(scope="module")
def victims(trained, mqar):
    """{kind: what makes a file of somebody else at a path}, each as itself and behind a symbolic link."""
    contents = {
        "checkpoint": (trained / "best.pt").read_bytes(),
        "config.json": (trained / "config.json").read_bytes(),
        "shard": (mqar / "train_0000.npy").read_bytes(),
        "meta.json": (mqar / "meta.json").read_bytes(),
        "model.py": (ROOT / "model.py").read_bytes(),
        "text": b"somebody's notes\n",
        "empty": b"",
    }
    made = {kind: lambda path, content=content: path.write_bytes(content) for kind, content in contents.items()}
    made |= {"folder": make_folder, "pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/null")}
    links = {f"link to {kind}": lambda path, make=make: link_to(path, make) for kind, make in made.items()}
    return made | links | {"broken link": lambda path: path.symlink_to("nowhere")}


def make_folder(path):
    path.mkdir()
    (path / "notes.txt").write_text("somebody's")


def link_to(path, make):
    make(path.with_name(LINKED))
    path.symlink_to(LINKED)


def state_of(folder):
    """{path: what is there} of all that is in a folder. No link is followed, and no pipe is read."""
    state = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            state[path] = os.readlink(path)
        else:
            state[path] = path.read_bytes() if path.is_file() else stat.S_IFMT(path.stat().st_mode)
    return state


# -- Files that a key names, and files that are made beside others -----------------------------------------------------


def evaluate_to(path, trained):
    evaluate.main([f"--checkpoint={trained}", f"--out={path}", "--device=cpu"])


def meters_to(path, trained):
    meters.main([f"--checkpoint={trained}", f"--out={path}", "--device=cpu"])


def meters_beside(path, trained):
    (path.parent / "best.pt").write_bytes(b"")  # is not read before the check
    meters.main([f"--checkpoint={path.parent / 'best.pt'}", "--device=cpu"])


def figure_to(path, trained):
    figure = plt.figure()
    try:
        drawing.write(figure, path)
    finally:
        plt.close(figure)


def text_page_to(path, trained):
    path.with_name("meters.json").write_text("{}")  # is not read before the check
    token_page.write_page(path.parent)


def experiment_to(path, trained):
    config = listed()
    if path.name != "rows.jsonl":
        write_rows(path.parent, rows_of(config))
    (path.parent / ".nanogate").write_text("experiment\n")
    keys = config.asked | {"out_dir": str(path.parent)}
    experiment.main([f"--config_override={json.dumps(keys)}"])


# (name of the file, what is asked to write it)
WRITERS = [
    ("out.json", evaluate_to), ("out.json", meters_to), ("meters.json", meters_beside),
    ("page.png", figure_to), ("page.html", text_page_to),
    *((name, experiment_to) for name in ("claims.json", *report.FIGURES)),
]  # fmt: skip


@pytest.fixture
def no_work(monkeypatch):
    """The work of a script is not to begin."""

    def fail(*words, **keys):
        pytest.fail("the work has begun")

    for module in (evaluate, meters):
        monkeypatch.setattr(module, "load_model", fail)
    monkeypatch.setattr(token_page, "load_model", fail)
    monkeypatch.setattr(runner, "work", fail)


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_file_of_another_kind_is_refused_before_the_work_and_stays(
    name, write, victims, trained, tmp_path, helpers, no_work
):
    for number, (kind, make) in enumerate(victims.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / name)
        before = state_of(folder)
        message = helpers.error_of(write, folder / name, trained)
        after = state_of(folder)
        assert name in message and before == {path: after[path] for path in before}, kind


def test_no_write_takes_the_place_of_a_pipe_or_a_folder(tmp_path, helpers):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder"):  # not /dev/null, which a failure would destroy
        assert "a folder or a device" in helpers.error_of(files.write_text, path, "a text")
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"] and not (tmp_path / "pipe").is_file()


@pytest.mark.parametrize("write", [evaluate_to, meters_to])
def test_a_key_that_names_a_file_of_a_run_of_data_or_of_code_is_refused(
    write, trained, mqar, tmp_path, helpers, no_work
):
    run, data = shutil.copytree(trained, tmp_path / "run"), shutil.copytree(mqar, tmp_path / "data")
    (run / "link.json").symlink_to("config.json")
    before = state_of(tmp_path)
    assert {"config.json", "metrics.jsonl", "model.py", "train_0000.npy", "meta.json"} < {path.name for path in before}
    long = data / ("a" * 300 + ".json")
    for path in [*before, run / ".", run / "..", ".", "..", "/dev/null", "/", long, tmp_path / "gone" / long.name[-9:]]:
        with pytest.raises(UserError):
            write(path, trained)
    assert state_of(tmp_path) == before and not os.path.isfile("/dev/null")


def test_an_older_output_of_its_own_kind_is_replaced(trained, text, tmp_path, helpers, capsys):
    run = helpers.train(text, tmp_path / "run", max_iters=2, eval_interval=2)
    of_both = {}
    for seed in range(2):
        evaluate_to(tmp_path / "scores.json", [trained, run][seed])
        meters.main([f"--checkpoint={run}", "--device=cpu", "--rows=2", f"--map=0.{seed}"])
        plot.main([str(run), "--html=true", f"--text=a text {seed}"])
        plot.main([str(run / "meters.json")])
        written = [tmp_path / "scores.json"]
        written += [run / name for name in ("meters.json", "page.html", "maps.png")]
        of_both[seed] = [path.read_bytes() for path in written]
    for path, first, second in zip(written, of_both[0], of_both[1], strict=True):
        assert first != second, path


def test_the_outputs_in_results_are_known_as_their_kinds():
    names = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    kinds = {"claims.json": "claims", "meters.json": "meters"} | dict.fromkeys(report.FIGURES, "figure")
    known = [(ROOT / name, kinds[os.path.basename(name)]) for name in names if os.path.basename(name) in kinds]
    assert {kind for _, kind in known} == {"claims", "meters", "figure"} or not names  # a copy without git
    assert all(files.is_of_kind(path, kind) for path, kind in known)


# -- Folders -----------------------------------------------------------------------------------------------------------


def train_in(out_dir, trained, mqar, helpers, **keys):
    helpers.train(mqar, out_dir, **dict(max_iters=2, eval_interval=2, meters=False) | keys)


def mqar_in(out_dir, trained, mqar, helpers, **keys):
    sizes = dict(slices="16/2", vocab_size=16, train_size=9, val_size=9)
    mqar_prepare.main(helpers.words(**sizes | keys, out_dir=out_dir))


def text_in(out_dir, trained, mqar, helpers, **keys):
    text_prepare.main([str(ROOT / "README.md"), *helpers.words(**keys, out_dir=out_dir)])


def export_in(out_dir, trained, mqar, helpers, **keys):
    export.main(helpers.words(checkpoint=trained, safetensors=out_dir, **keys))


def bench_in(out_dir, trained, mqar, helpers, **keys):
    bench.main(["ops", *helpers.words(device="cpu", dtype="float32", out_dir=out_dir, **keys)])


def experiment_in(out_dir, trained, mqar, helpers, **keys):
    asked = listed().asked | {"out_dir": str(out_dir)} | keys
    experiment.main([f"--config_override={json.dumps(asked)}"])


SCRIPTS = [train_in, mqar_in, text_in, export_in, bench_in, experiment_in]


@pytest.mark.parametrize("write", SCRIPTS)
def test_an_out_dir_that_is_somebody_elses_or_no_name_is_refused_and_stays(
    write, victims, trained, mqar, tmp_path, helpers
):
    for number, (kind, make) in enumerate(victims.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / "out")
        before = state_of(folder)
        helpers.error_of(write, folder / "out", trained, mqar, helpers)
        assert state_of(folder) == before, kind
    before = state_of(tmp_path)
    for name in ("a" * 300, "/".join(["a" * 200] * 30), "2/out/below"):
        with pytest.raises(UserError):
            write(tmp_path / name, trained, mqar, helpers)
        assert state_of(tmp_path) == before, name


@pytest.mark.parametrize("how", ["scratch", "resume", "auto"])
def test_an_out_dir_that_is_too_long_is_a_mistake_in_every_way_to_start(how, mqar, helpers):
    assert "a" * 99 in helpers.error_of(helpers.train, mqar, "a" * 300, init_from=how)


# {script: (kind of its folder, files that it writes there, folders that it makes there)}
INSIDE = {
    train_in: ("run", ["config.json", "metrics.jsonl", "best.pt", "meters.json"], ["code", "tensorboard"]),
    mqar_in: ("data set", ["meta.json", "train_0000.npy"], [".new"]),
    export_in: ("export", ["config.json", "model.safetensors"], [".new"]),
    bench_in: ("bench", ["ops.jsonl"], []),
    experiment_in: ("experiment", ["rows.jsonl"], ["locks"]),
}
NO_LOCKS = ("text", "folder", "pipe", "link to text", "link to empty", "broken link")


@pytest.mark.parametrize("write", INSIDE)
def test_what_is_no_file_in_a_folder_of_our_own_is_found_before_the_work(
    write, victims, trained, mqar, tmp_path, helpers, no_work
):
    of_kind, names, folders = INSIDE[write]
    cases = [(name, kind) for name in names for kind in ("folder", "pipe")]
    cases += [(name, kind) for name in folders for kind in ("text", "pipe", "link to folder", "broken link")]
    if write is train_in:
        cases += [("lock", kind) for kind in NO_LOCKS]
    if write is experiment_in:
        cases += [("rows.jsonl", "link to text"), ("rows.jsonl", "broken link")]
    keys = {} if write is experiment_in else {"overwrite": True}
    for number, (name, kind) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / ".nanogate").write_text(f"{of_kind}\n")
        victims[kind](folder / name)
        before = state_of(folder)
        message = helpers.error_of(write, folder, trained, mqar, helpers, **keys)
        after = state_of(folder)
        assert name in message and before == {path: after[path] for path in before}, (name, kind)


@pytest.mark.parametrize("write", [mqar_in, export_in])
def test_a_link_in_the_place_of_new_leads_to_no_output_of_our_own_either(write, trained, mqar, tmp_path, helpers):
    other, out = tmp_path / "other", tmp_path / "out"
    write(other, trained, mqar, helpers)
    out.mkdir()
    (out / ".nanogate").write_text(f"{INSIDE[write][0]}\n")
    (out / ".new").symlink_to(other)
    before = state_of(tmp_path)
    assert ".new: cannot be written (is a link" in helpers.error_of(write, out, trained, mqar, helpers)
    assert state_of(tmp_path) == before


# -- Links and hard links ----------------------------------------------------------------------------------------------


def linked_copy(folder, copy):
    """`cp -al`: every file of the copy is a hard link."""
    return shutil.copytree(folder, copy, copy_function=os.link)


def test_a_run_that_goes_on_in_a_hard_linked_copy_leaves_the_first_one_as_it_is(run, tmp_path, monkeypatch, helpers):
    keys = dict(max_iters=2, schedule="constant", logger="tensorboard")
    first = run("first", **keys)
    copy = linked_copy(first, tmp_path / "copy")
    before = state_of(first)
    (tmp_path / "clone").mkdir()
    for name in outdir.code_of_the_project():  # a clone whose code was edited
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "clone" / name).write_bytes((ROOT / name).read_bytes() + b"# edited\n")
    monkeypatch.setattr(outdir, "ROOT", tmp_path / "clone")
    run("copy", **keys | {"max_iters": 3, "init_from": "resume"})
    assert state_of(first) == before
    assert (copy / "code" / "model.py").read_bytes() == (tmp_path / "clone" / "model.py").read_bytes()
    assert checkpoints.load(copy)["iter_num"] == 3 and list(helpers.losses(copy)) == [0, 1, 2]


def test_a_folder_of_a_run_that_is_a_link_is_not_written_to(run, tmp_path, helpers):
    keys = dict(max_iters=1, logger="tensorboard")
    first = run("first", **keys)
    before = state_of(first)
    for name in ("code", "code/ops", "tensorboard"):
        second = shutil.copytree(first, tmp_path / "second", dirs_exist_ok=True)
        shutil.rmtree(second / name)
        (second / name).symlink_to(first / name)
        message = helpers.error_of(run, "second", **keys | {"overwrite": True})
        assert f"second/{name}: cannot be written (is a link" in message
        assert state_of(first) == before
        (second / name).unlink()


def test_a_lock_is_written_into_no_file_of_somebody_else(tmp_path, helpers):
    (tmp_path / "lock").write_text("somebody's notes")
    assert "lock: is no lock of this project" in helpers.error_of(files.lock, tmp_path)
    assert (tmp_path / "lock").read_text() == "somebody's notes"
    for content in ("", "process 12 on a-machine\n"):
        (tmp_path / "lock").write_text(content)
        with files.lock(tmp_path):
            assert "is running in it" in helpers.error_of(files.lock, tmp_path)
        files.lock(tmp_path).close()


def test_a_start_with_auto_does_not_write_into_a_lock_of_somebody_else(mqar, tmp_path, helpers):
    (tmp_path / "lock").write_text("somebody's notes")
    message = helpers.error_of(helpers.train, mqar, tmp_path, init_from="auto")
    assert "lock: is no lock" in message and (tmp_path / "lock").read_text() == "somebody's notes"


def test_a_lock_of_an_experiment_that_is_a_link_to_a_folder_is_refused(tmp_path, helpers):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "rows").symlink_to(tmp_path / "elsewhere")
    assert "locks/rows: cannot be written (is a link" in helpers.error_of(runner.append_row, tmp_path, {"a": 1})
    assert not os.listdir(tmp_path / "elsewhere") and not (tmp_path / "rows.jsonl").exists()


def test_data_behind_a_link_are_read_by_an_experiment_and_not_made_anew(tmp_path, helpers):
    config, keys = listed(), listed().data
    first = runner.prepare(config, keys, 0, tmp_path / "first")
    before = state_of(first)
    (tmp_path / "second").symlink_to("first")
    assert runner.prepare(config, keys, 0, tmp_path / "second").samefile(first)
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "seed0").symlink_to(first)
    for name in ("second", "third/seed0"):
        message = helpers.error_of(
            runner.prepare, config, keys | {"pairs": 2}, 0, tmp_path / name.removesuffix("/seed0")
        )
        assert f"{name}: cannot be written (is a link" in message and state_of(first) == before


def test_prepared_json_of_somebody_else_stays(tmp_path, helpers):
    (tmp_path / "seed0").mkdir()
    (tmp_path / "seed0" / "prepared.json").write_text('{"dinner": true}')
    message = helpers.error_of(runner.prepare, listed(), listed().data, 0, tmp_path)
    assert "seed0: holds what is not of this project (prepared.json)" in message
    assert (tmp_path / "seed0" / "prepared.json").read_text() == '{"dinner": true}'


# -- What is removed ---------------------------------------------------------------------------------------------------


def test_claims_of_somebody_else_stay_where_an_experiment_has_none_and_its_own_old_ones_go(tmp_path, helpers):
    config, claim = listed(), {"name": "a claim", "verdict": "passed", "seeds": {"0": 1.0}}
    write_rows(tmp_path, rows_of(config))
    for content in ({"claim": ["of a patent"]}, {"claims": [claim], "more": {}}, ["a list"]):
        (tmp_path / "claims.json").write_text(json.dumps(content))
        if content == {"claims": [claim], "more": {}}:
            show(config, tmp_path)
            assert not (tmp_path / "claims.json").exists()
        else:
            assert "claims.json: is something else" in helpers.error_of(show, config, tmp_path)
            assert json.loads((tmp_path / "claims.json").read_text()) == content


def test_a_run_removes_the_pictures_of_the_one_that_it_overwrites(run, tmp_path):
    out = run("out", max_iters=1)
    (out / "ckpt.pt").unlink()
    (out / "best.pt").unlink()
    (out / "page.png").write_bytes(b"of a camera")
    run("out", max_iters=1)
    assert (out / "page.png").exists()
    run("out", max_iters=1, overwrite=True)
    assert not (out / "page.png").exists()


# -- Data sets ---------------------------------------------------------------------------------------------------------


def test_a_data_set_replaces_the_files_of_the_one_before(trained, mqar, tmp_path, helpers):
    def write(**keys):
        mqar_in(tmp_path, trained, mqar, helpers, **keys)

    write(slices="16/2,16/3")
    assert (tmp_path / "train_0001.npy").exists()
    write(overwrite=True)
    assert not (tmp_path / "train_0001.npy").exists()


def test_overwrite_removes_every_checkpoint_of_the_old_run_also_of_a_relative_out_dir(keys, helpers, monkeypatch):
    monkeypatch.chdir(keys("out")["out_dir"].parent)
    given = keys("out") | dict(out_dir="relative", max_iters=4, eval_interval=2, keep_interval=2)
    helpers.train(**given)
    assert Path("relative/ckpt-2.pt").exists() and Path("relative/ckpt-4.pt").exists()
    helpers.train(**given | dict(keep_interval=None, overwrite=True))
    assert sorted(path.name for path in Path("relative").glob("*.pt")) == ["best.pt", "ckpt.pt"]
