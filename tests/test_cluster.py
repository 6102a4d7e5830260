"""Several machines, as far as two cores can play them: forked ranks, torchrun, and stand-ins for SLURM's commands."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
from conftest import ROOT, wait_until
from test_resume import FORKS, wait_for_step

import experiment
import train
from base import configurator, files
from base.configurator import UserError
from runs import checkpoint as checkpoints
from runs import outdir, resume
from runs.hardware import Processes

KEYS = dict(gradient_accumulation_steps=4, max_iters=200, eval_interval=50, n_layer=1, dropout=0.1, meters="false")


def a_rank(environment, said, main, given):
    os.environ |= {name: str(value) for name, value in environment.items()}
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    main(given)


class Ranks:
    """Ranks(2, main, given, said): main(given) in so many processes, without torchrun; what they print goes to said."""

    def __init__(self, count, main, given, said):
        self.said, self.processes = Path(said), []
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for rank in range(count):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment["TORCHELASTIC_RESTART_COUNT"] = rank  # each torchrun counts its own restarts
            self.processes.append(FORKS.Process(target=a_rank, args=(environment, self.said, main, given)))
            self.processes[-1].start()

    def is_alive(self):
        return all(process.is_alive() for process in self.processes)

    def end(self):
        """The exit statuses."""
        for process in self.processes:
            process.join(600)
        return [process.exitcode for process in self.processes]


# -- What the processes of a run tell each other -----------------------------------------------------------------------


def one_after_the_other(cases):
    """Prints how each case {name: [words of each rank]} ends on each rank; the last one ends the process."""
    with Processes("cpu", 1) as processes:
        for name, words in cases.items():
            other = lambda: ("", {"runs/parallel.py": processes.rank})  # noqa: E731
            ended = "fine"
            try:
                with mock.patch.object(resume, "code_sha256", other if name == "code" else outdir.code_sha256):
                    given = configurator.read_words(train.TrainConfig, words[processes.rank])
                    train.train_from(train.where_to_start(given), processes)
            except UserError as error:
                ended = str(error)
            os.write(1, f"{name} of rank {processes.rank}: {ended}\n".encode())


def test_ranks_that_differ_are_refused(keys, mqar, helpers, tmp_path):
    a, b = (helpers.train(**keys(name, max_iters=1, seed=seed)) for seed, name in enumerate("ab"))
    ours, of_a = keys("out", max_iters=1), keys("a", max_iters=1, init_from="auto")
    cases = {  # {name: (what is named, the keys of each rank)}
        "keys": ("learning_rate", ours, ours | dict(learning_rate=1e-2)),
        "start": ("init_from", ours, ours | dict(init_from="auto")),
        "disks": (f"the ckpt.pt of {a}", of_a, of_a | dict(out_dir=tmp_path / "elsewhere")),
        "code": ("runs/parallel.py", ours, ours),
        "weights": (a, *(ours | dict(init_from=path, parallel="fsdp") for path in (a, b))),
        "threads": (None, ours, ours | dict(threads=2)),  # machines may have other numbers of cores
    }
    before = (a / "ckpt.pt").read_bytes()
    words = {name: [helpers.words(**keys) for keys in ranks] for name, (_, *ranks) in cases.items()}
    ended = Ranks(2, one_after_the_other, words, tmp_path / "said.txt")
    assert ended.end() == [0, 0]
    said = ended.said.read_text()
    for name, (differs, *_) in cases.items():
        if differs is not None:
            other = f"is another one for rank 1 on {socket.gethostname()} than for rank 0"
            assert f"{name} of rank 0: {differs} {other}" in said
            assert re.search(f"{name} of rank 1: .* {other}", said)
    assert "threads of rank 0: fine" in said and "threads of rank 1: fine" in said
    assert (a / "ckpt.pt").read_bytes() == before and not (tmp_path / "elsewhere").exists()


def test_a_signal_to_one_rank_saves_and_ends_all_at_the_next_line_of_the_log(keys, helpers, tmp_path):
    case = keys("out", max_iters=100_000, eval_interval=50_000, log_interval=3)
    out, both = case["out_dir"], Ranks(2, train.main, helpers.words(**case), tmp_path / "said.txt")
    wait_for_step(out, 6, both.is_alive)
    os.kill(both.processes[1].pid, signal.SIGTERM)
    assert both.end() == [143, 143]
    step = checkpoints.load(out)["iter_num"]
    assert step >= 9 and step % 3 == 0 and list(helpers.losses(out)) == list(range(0, step, 3))
    assert f"SIGTERM: saved at step {step} of 100000" in both.said.read_text()


def stopped_in_its_second_evaluation(words):
    """train.main. Before the second batch the second process alone gets SIGTERM; the fourth batch is one too many."""
    evaluate, evaluations = train.evaluate, itertools.count(1)

    def acting(*words, before_batch, **given):
        is_second, batches = next(evaluations) == 2, itertools.count(1)

        def before():
            batch = next(batches)
            if is_second and batch == 2 and os.environ["RANK"] == "1":
                signal.raise_signal(signal.SIGTERM)
            if is_second and batch == 4:
                os._exit(9)
            before_batch()

        return evaluate(*words, before_batch=before, **given)

    with mock.patch.object(train, "evaluate", acting):
        train.main(words)


def test_a_signal_to_one_rank_ends_an_evaluation_on_all_with_its_step_saved(keys, helpers, tmp_path):
    case = keys("out", max_iters=20, eval_interval=7)
    both = Ranks(2, stopped_in_its_second_evaluation, helpers.words(**case), tmp_path / "said.txt")
    assert both.end() == [143, 143]
    assert checkpoints.load(case["out_dir"])["iter_num"] == 7
    assert [row["step"] for row in helpers.metrics(case["out_dir"], "eval")] == [0]
    assert "SIGTERM: saved at step 7 of 20; --init_from=resume goes on from there" in both.said.read_text()


# -- A run that was cut off goes on, with any number of processes ------------------------------------------------------


def test_torchrun_restarts_after_a_dead_rank_saves_at_sigterm_and_has_the_curve_of_one_process(keys, helpers):
    case = dict(gradient_accumulation_steps=2, max_iters=240, eval_interval=40)
    whole, out = helpers.train(**keys("whole", **case)), keys("out")["out_dir"]
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1", "train.py"]
    words = [sys.executable, "-m", *launch, *helpers.words(**keys("out", init_from="auto", **case))]
    torchrun = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    is_alive = lambda: torchrun.poll() is None  # noqa: E731
    wait_for_step(out, 50, is_alive)
    ranks = subprocess.run(["pgrep", "-P", str(torchrun.pid)], capture_output=True, text=True).stdout.split()
    started = (out / "config.json").stat().st_mtime_ns
    os.kill(int(ranks[1]), signal.SIGKILL)
    wait_until(lambda: (out / "config.json").stat().st_mtime_ns != started, is_alive)
    wait_for_step(out, 130, is_alive)
    torchrun.terminate()
    said, complained = torchrun.communicate(timeout=120)
    assert "has lost the others: one of them was killed, has ended and printed why" in complained
    assert re.search(f"resuming {out} at step (40|80|120)", said)
    step = checkpoints.load(out)["iter_num"]
    assert 131 <= step < 240 and list(helpers.losses(out)) == list(range(step))
    helpers.train(**keys("out", init_from="resume", **case))
    assert helpers.losses(out) == pytest.approx(helpers.losses(whole), rel=1e-3)  # each step once
    ours, theirs = ([row["val_loss"] for row in helpers.metrics(folder, "eval")] for folder in (out, whole))
    assert ours == pytest.approx(theirs, rel=1e-3) and helpers.metrics(out)[-1]["event"] == "end"


def test_a_requeued_job_waits_for_the_lock_of_a_dead_machine_and_not_for_ever(keys, helpers, monkeypatch, capsys):
    out, again = helpers.train(**keys("out", max_iters=4)), keys("out", max_iters=5, init_from="auto")
    monkeypatch.setattr(resume, "LOCK_WAIT", 0.2)
    with files.lock(out):
        assert "is running in it; wait, stop it" in helpers.error_of(helpers.train, **again)
    monkeypatch.setattr(resume, "LOCK_WAIT", 60.0)
    held, go_on = files.lock(out), resume.go_on

    def goes_on(*args):
        assert held.closed  # ckpt.pt is not read while somebody may still write it
        return go_on(*args)

    monkeypatch.setattr(resume, "go_on", goes_on)
    threading.Timer(0.5, held.close).start()
    helpers.train(**again)
    assert checkpoints.load(out)["iter_num"] == 5 and "waiting up to 60 s" in capsys.readouterr().out


# stand-ins for SLURM's commands: srun starts the command once a machine, scancel signals it. JOB is how they know the
# job: in an array its task, and not SLURM_JOB_ID, which may be the number of the whole array
SLURM = {
    "srun": """
        [ "$1" = "--cpus-per-task=$SLURM_CPUS_PER_TASK" ] || exit 2
        shift
        for _ in $(seq "$SLURM_NNODES"); do "$@" & echo $! >> "$STATE/step"; done
        for pid in $(cat "$STATE/step"); do wait "$pid" || status=$?; done
        rm "$STATE/step"
        exit ${status:-0}
    """,
    "scancel": '[ "$1" = --signal=TERM ] && [ "$2" = "$JOB" ] && kill -TERM $(cat "$STATE/step")',
    "scontrol": """
        case "$1 $2" in
            "show hostnames") echo 127.0.0.1 ;;
            "requeue $JOB") touch "$STATE/requeued" ;;
            "show job") [ -f "$STATE/preempted" ] && echo "   PreemptTime=2026-11-25T12:00:00 Reason=None" ;;
            *) exit 1 ;;
        esac
    """,
}
# in place of torchrun and python: a command that waits for SIGTERM, and ends as train.py does
SLURM["torchrun"] = 'trap "exit 143" TERM; echo "$@" >> "$STATE/words"; while :; do sleep 0.1; done'
# train.sbatch asks python for the out_dir
SLURM["python"] = f'[ "$1" = -c ] && exec {sys.executable} "$@"\n{SLURM["torchrun"]}'


@pytest.mark.parametrize("end", ["its time", "a preemption", "scancel"])
@pytest.mark.parametrize("name", ["train.sbatch", "experiment.sbatch"])
def test_a_job_script_stops_its_command_when_its_time_ends_and_is_requeued(name, end, tmp_path):
    text = (ROOT / "config" / "slurm" / name).read_text()
    (words,) = re.findall(rf"^#   sbatch config/slurm/{name} (.*)$", text, re.M)
    kind = train.TrainConfig if "train.py" in text else experiment.ExperimentConfig
    configurator.load(kind, words.split())  # the keys of the example exist
    lines = re.findall(r"^#SBATCH (\S*)", text, re.M)
    assert {"--requeue", "--signal=B:USR1@300", "--open-mode=append"} <= set(lines)
    for command, content in SLURM.items():
        (tmp_path / command).write_text(f"#!/bin/bash\n{content}\n")
        (tmp_path / command).chmod(0o755)
    number = "7_3" if "--array=" in text else "7"
    environment = dict(SLURM_JOB_ID="7", SLURM_NNODES="2", SLURM_JOB_NODELIST="n[1-2]", SLURM_CPUS_PER_TASK="1")
    environment |= dict(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3") if "_" in number else {}
    saved = tmp_path / "out" / "pystdlib" / "ckpt.pt"
    if end == "a preemption":  # after an earlier one, which has saved
        saved.parent.mkdir(parents=True)
        saved.touch()
        environment["SLURM_RESTART_COUNT"] = "1"
    environment |= dict(JOB=number, STATE=str(tmp_path), PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    (tmp_path / "config").symlink_to(ROOT / "config")
    words = words.replace(" --out_dir=out/pystdlib", "")  # which the config has, too
    command = ["bash", ROOT / "config" / "slurm" / name, *words.split()]
    job = subprocess.Popen(command, cwd=tmp_path, env=os.environ | environment)
    both = [tmp_path / "words", tmp_path / "step"]  # a line of each machine
    wait_until(lambda: all(file.is_file() and len(file.read_text().splitlines()) == 2 for file in both))
    if end == "its time":
        job.send_signal(signal.SIGUSR1)
    else:
        (tmp_path / ("preempted" if end == "a preemption" else "cancelled")).touch()
        for pid in (tmp_path / "step").read_text().split():
            os.kill(int(pid), signal.SIGTERM)
    assert job.wait(30) == 143 and (tmp_path / "requeued").is_file() == (end != "scancel")
    started = set((tmp_path / "words").read_text().splitlines())
    (line,) = started  # of both machines
    goes_on = " --init_from=auto" * (saved.is_file() and "train.py" in text)
    assert line.endswith(("train.py --init_from=auto " if "train.py" in text else "experiment.py ") + words + goes_on)


def test_tensorboard_has_every_number_of_the_rows_once_also_after_a_kill(keys, helpers, monkeypatch):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    case = dict(
        meters="true", eval_interval=4, schedule="constant", logger="tensorboard", gradient_accumulation_steps=1
    )
    out = helpers.train(**keys("out", max_iters=6, **case))
    with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:  # steps that a kill has undone
        file.write(json.dumps({"event": "train", "step": 6, "loss": 99.0, "tokens_per_second": 9}) + "\n")
    helpers.train(**keys("out", max_iters=8, init_from="auto", **case))
    board = accumulators.EventAccumulator(str(out / "tensorboard"), {"scalars": 0})
    board.Reload()
    curves = {name: [(event.step, event.value) for event in board.Scalars(name)] for name in board.Tags()["scalars"]}
    for event, name in (("train", "loss"), ("eval", "val_loss")):
        expected = [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in helpers.metrics(out, event)]
        assert curves[f"{event}/{name}"] == expected
    assert [step for step, _ in curves["train/loss"]] == list(range(8))
    assert [step for step, _ in curves["eval/meters/branch/0"]] == [0, 4, 6, 8]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "pip install tensorboard" in helpers.error_of(helpers.train, **keys("out", overwrite=True, **case))
    assert (out / "ckpt.pt").is_file()
