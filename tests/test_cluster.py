"""
Several machines, as far as two cores can play them: ranks that are forked here, two torchruns that meet on localhost,
and the files of config/slurm with stand-ins for SLURM's commands. A run that is cut off goes on with other numbers.

    python -m pytest tests/test_cluster.py
"""

import configurator

import datetime
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import evaluate
import experiment
import train
from data.shards import open_dataset
from runs import checkpoint as checkpoints
from runs import files, hardware, outdir
from study import runner

ROOT = Path(train.__file__).parent
# a forked process has torch at once; torchrun needs seconds
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train"])
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
KEYS = dict(gradient_accumulation_steps=4, max_iters=200, eval_interval=50, n_layer=1, dropout=0.1, meters="false")


@pytest.fixture
def keys(mqar, tmp_path, helpers):
    """keys(name, key=value, ...) -> the keys of a run of the tiny model on MQAR in the folder of that name."""
    return lambda name, **keys: helpers.tiny | KEYS | dict(dataset=mqar, out_dir=tmp_path / name) | keys


@pytest.fixture(scope="module")
def whole(mqar, tmp_path_factory, helpers):
    """The run of one process that was never stopped."""
    return helpers.train(mqar, tmp_path_factory.mktemp("whole") / "out", **KEYS)


def check_same_curve(out, whole, helpers):
    """Losses and evaluations are those of the other run, each step once; other sums of gradients round otherwise."""
    assert helpers.losses(out) == pytest.approx(helpers.losses(whole), rel=1e-3)
    ours, theirs = ([row["val_loss"] for row in helpers.metrics(folder, "eval")] for folder in (out, whole))
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert helpers.metrics(out)[-1]["event"] == "end"


def a_rank(environment, words, said, edit, main):
    os.environ |= environment
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    if edit is not None:
        edit()
    main(words)


class Ranks:
    """Ranks(2, keys, helpers): train.py in so many processes, without torchrun; keys may be a list, one dict a rank."""

    def __init__(self, count, keys, helpers, edit=None, main=train.main):
        of_each = keys if isinstance(keys, list) else [keys] * count
        self.said = Path(f"{of_each[0].get('out_dir') or of_each[0]['checkpoint']}.{count}.txt")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.processes = []
        for rank in range(count):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment["TORCHELASTIC_RESTART_COUNT"] = rank  # each torchrun counts its own restarts
            environment = {name: str(value) for name, value in environment.items()}
            words = helpers.words(**of_each[rank])
            self.processes.append(FORKS.Process(target=a_rank, args=(environment, words, self.said, edit, main)))
            self.processes[-1].start()

    def poll(self):
        return next((p.exitcode for p in self.processes if p.exitcode is not None), None)

    def kill(self, rank, number):
        os.kill(self.processes[rank].pid, number)

    def end(self):
        """The exit statuses."""
        for process in self.processes:
            process.join(120)
        return [process.exitcode for process in self.processes]


def wait_for_step(out, step, process):
    """Until metrics.jsonl has the row of that step."""
    file = out / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or file.is_file() and f'"step": {step},' in file.read_text())
    assert process.poll() is None


# ----------------------------------------------------------------------------------------------------------------------
# What the processes of a run tell each other


@pytest.mark.parametrize("name", ["mixed_mqar", "text"])
def test_every_process_counts_the_labels_of_all_without_asking(name, request):
    dataset, accumulation = open_dataset(request.getfixturevalue(name)), 4
    keys = dict(seed=7, batch_size=3, block_size=32, gradient_accumulation_steps=accumulation)
    for step in (0, 1, 30, 500):  # epochs begin and end in between
        found = [
            int((dataset.batch("train", step, micro_step=m, **keys)[1] != -100).sum()) for m in range(accumulation)
        ]
        for micro_steps in ([0, 1, 2, 3], [1, 3], []):
            counted = dataset.count_labels("train", step, micro_steps=micro_steps, **keys)
            assert counted == sum(found[m] for m in micro_steps)


def print_reductions():
    """Prints at each step how often the processes have agreed on something since the step before."""
    calls, micro_loss, seen = [], train.micro_loss, []

    def counted(name):
        function = getattr(torch.distributed, name)
        setattr(torch.distributed, name, lambda *args, **keys: calls.append(name) or function(*args, **keys))

    def watched(model, config, dtype, step, batch):
        if step not in seen:
            os.write(1, f"step {step} of rank {os.environ['RANK']}: {len(calls)} calls\n".encode())
            calls.clear()
            seen.append(step)
        return micro_loss(model, config, dtype, step, batch)

    for name in ("all_reduce", "broadcast_object_list", "all_gather_object"):
        counted(name)
    train.micro_loss = watched


def test_besides_the_gradients_a_step_reduces_its_loss_alone_and_a_logged_one_the_signal(keys, helpers):
    ranks = Ranks(2, keys("out", max_iters=8, log_interval=4, eval_interval=100), helpers, print_reductions)
    assert ranks.end() == [0, 0], ranks.said.read_text()
    for rank in (0, 1):
        found = re.findall(rf"step [1-7] of rank {rank}: (\d+) calls", ranks.said.read_text())
        assert found == ["1", "1", "1", "2", "1", "1", "1"]


def test_a_signal_to_one_rank_saves_and_ends_all_at_the_next_line_of_the_log(keys, helpers):
    out = keys("out")["out_dir"]
    ranks = Ranks(2, keys("out", max_iters=100_000, eval_interval=50_000, log_interval=3), helpers)
    wait_for_step(out, 6, ranks)
    ranks.kill(1, signal.SIGTERM)
    assert ranks.end() == [143, 143]
    step = checkpoints.load(out)["iter_num"]
    assert step >= 9 and step % 3 == 0 and list(helpers.losses(out)) == list(range(0, step, 3))
    assert f"SIGTERM: saved at step {step} of 100000" in ranks.said.read_text()


def be_impatient():
    hardware.MOST_WAIT = datetime.timedelta(seconds=90)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_that_dies_or_stops_to_answer_ends_the_others_with_one_line(keys, helpers, number):
    out = keys("out")["out_dir"]
    edit = be_impatient if number == signal.SIGSTOP else None
    ranks = Ranks(2, keys("out", max_iters=100_000, eval_interval=50_000), helpers, edit)
    wait_for_step(out, 3, ranks)
    ranks.kill(0, number)
    ranks.processes[1].join(240)
    assert ranks.processes[1].exitcode == 1
    ranks.processes[0].kill()
    ranks.end()
    (line,) = [line for line in ranks.said.read_text().splitlines() if "error" in line]
    assert "error: rank 1 has lost the others: one of them has ended, and has printed why, or has not answered" in line


def test_machines_that_do_not_see_the_same_files_are_refused(keys, helpers):
    out = helpers.train(**keys("out", max_iters=4, lr_decay_iters=200))
    before = (out / "ckpt.pt").read_bytes()
    elsewhere = keys("elsewhere", init_from="auto")
    ranks = Ranks(2, [keys("out", init_from="auto"), elsewhere], helpers)
    assert ranks.end() == [2, 2]
    (line,) = [line for line in ranks.said.read_text().splitlines() if line.startswith("error:")]
    assert f"the ckpt.pt of {out} is another one for rank 1 on {socket.gethostname()} than for rank 0" in line
    assert (out / "ckpt.pt").read_bytes() == before and not elsewhere["out_dir"].exists()


def other_code():
    if os.environ["RANK"] == "1":
        sha256_of = outdir.sha256_of
        outdir.sha256_of = lambda names: sha256_of(names) | {"runs/parallel.py": "another"}


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        (dict(learning_rate=1e-2), "learning_rate"),
        (dict(seed=7), "seed"),
        (dict(init_from="auto"), "init_from"),
        (other_code, "runs/parallel.py"),
        (dict(threads=2), None),  # machines may have other numbers of cores
    ],
)
def test_ranks_of_other_keys_or_other_code_are_refused_before_the_first_step(differs, named, keys, helpers):
    ours, edit = keys("out", max_iters=1), differs if callable(differs) else None
    ranks = Ranks(2, [ours, ours if edit else ours | differs], helpers, edit)
    if named is None:
        assert ranks.end() == [0, 0]
        return
    assert ranks.end() == [2, 2]
    (line,) = [line for line in ranks.said.read_text().splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: {named} is another one for rank 1 on {socket.gethostname()} than for rank 0")
    assert not ours["out_dir"].exists()


def test_ranks_that_evaluate_with_other_keys_are_refused(keys, mqar, helpers):
    out = helpers.train(**keys("out", max_iters=1))
    ours = dict(checkpoint=out, dataset=mqar, device="cpu", threads=1)
    ranks = Ranks(2, [ours, ours | dict(dtype="bfloat16")], helpers, main=evaluate.main)
    assert ranks.end() == [2, 2]
    assert "error: dtype is another one for rank 1 on" in ranks.said.read_text()


@pytest.mark.parametrize("program", ["train", "evaluate"])
def test_machines_that_read_other_weights_are_refused(keys, mqar, helpers, program):
    a, b = (helpers.train(**keys(name, max_iters=1, seed=seed)) for seed, name in enumerate("ab"))
    if program == "train":
        of_each, main = [keys("out", init_from=path, parallel="fsdp") for path in (a, b)], train.main
    else:
        of_each, main = [dict(checkpoint=path, dataset=mqar, device="cpu", threads=1) for path in (a, b)], evaluate.main
    ranks = Ranks(2, of_each, helpers, main=main)
    ranks.end()
    (line,) = [line for line in ranks.said.read_text().splitlines() if "error:" in line]
    assert f"error: {a} is another one for rank 1 on {socket.gethostname()} than for rank 0" in line


def run_out_of_memory():
    micro_loss = train.micro_loss
    train.micro_loss = lambda *args: micro_loss(*args) if os.environ["RANK"] == "0" else torch.empty(1 << 60)


def test_a_rank_that_alone_runs_out_of_memory_says_so(keys, helpers):
    ranks = Ranks(2, keys("out"), helpers, run_out_of_memory)
    assert ranks.end() == [1, 1]
    assert "error: not enough memory" in ranks.said.read_text()


def test_restarts_on_several_machines_need_a_store_of_their_own(monkeypatch, helpers):
    places = dict(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, MASTER_ADDR="a", MASTER_PORT=1)
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert hardware.places_of_torchrun() == (0, 2, 0, 1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in helpers.error_of(hardware.places_of_torchrun)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert hardware.places_of_torchrun() == (0, 2, 0, 1)


# ----------------------------------------------------------------------------------------------------------------------
# A run that was cut off goes on, with any number of processes


def die_while_saving():
    """The process that writes ckpt.pt of step 100 is killed when half of it is written."""
    save = torch.save

    def half(checkpoint, file):
        save(checkpoint, file)
        if checkpoint["iter_num"] == 100 and "ckpt.pt" in file.name:
            file.truncate(file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [(1, "ddp"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, "ddp"), (1, "fsdp"), (4, "fsdp")))],
)
def test_a_job_killed_in_the_middle_of_a_save_goes_on_with_another_number_of_processes(
    keys, helpers, whole, processes, parallel, capsys
):
    out = keys("out")["out_dir"]
    first = Ranks(2, keys("out", init_from="auto", parallel=parallel), helpers, die_while_saving)
    assert first.end() == [-signal.SIGKILL, 1]
    assert len(list(out.glob(".ckpt.pt.*.tmp"))) == 1 and checkpoints.load(out)["iter_num"] == 50
    if processes == 1:
        helpers.train(**keys("out", init_from="auto"))
        said = capsys.readouterr().out
    else:
        again = Ranks(processes, keys("out", init_from="auto", parallel=parallel), helpers)
        assert again.end() == [0] * processes
        said = again.said.read_text()
    assert f"resuming {out} at step 50" in said and not list(out.glob(".*.tmp"))
    check_same_curve(out, whole, helpers)


@pytest.mark.slow
def test_a_run_is_handed_on_between_1_2_and_4_processes_in_every_way(keys, helpers, whole):
    out, last = keys("out")["out_dir"], 0
    parts = [(1, "ddp"), (2, "ddp"), (4, "fsdp"), (4, "ddp"), (1, "ddp"), (4, "ddp"), (4, "fsdp"), (2, "fsdp")]
    parts += [(4, "ddp"), (2, "fsdp"), (1, "fsdp")]
    handed = {(one[0], other[0]) for one, other in itertools.pairwise(parts)}
    assert handed >= set(itertools.permutations((1, 2, 4), 2))
    for count, parallel in parts:
        last += 9
        changed = dict(init_from="auto", max_iters=last, lr_decay_iters=200, parallel=parallel)
        if count == 1:
            helpers.train(**keys("out", **changed))
        else:
            assert Ranks(count, keys("out", **changed), helpers).end() == [0] * count
        assert checkpoints.load(out)["iter_num"] == last
    # the end of each part has evaluated, too
    expected = {step: loss for step, loss in helpers.losses(whole).items() if step < last}
    assert helpers.losses(out) == pytest.approx(expected, rel=1e-3)


def test_a_requeued_job_waits_for_the_lock_of_a_dead_machine_and_not_for_ever(keys, helpers, monkeypatch, capsys):
    pytest.importorskip("fcntl")
    out = helpers.train(**keys("out", max_iters=4))
    before = (out / "ckpt.pt").read_bytes()
    helpers.train(**keys("out", max_iters=5, lr_decay_iters=4, init_from="resume"))
    after = (out / "ckpt.pt").read_bytes()
    (out / "ckpt.pt").write_bytes(before)
    held = files.lock(out)  # as a file server holds it for a while, or the job before, which still saves

    def end():
        files.write_whole(out / "ckpt.pt", lambda file: file.write(after))
        held.close()

    threading.Timer(0.5, end).start()
    helpers.train(**keys("out", max_iters=6, lr_decay_iters=4, init_from="auto"))
    said = capsys.readouterr().out
    assert f"process {os.getpid()} on {socket.gethostname()} is running in it; waiting up to 120 seconds" in said
    assert f"resuming {out} at step 5" in said and checkpoints.load(out)["iter_num"] == 6
    monkeypatch.setattr(outdir, "LOCK_WAIT", 0.2)
    with files.lock(out):
        assert "is running in it; wait, stop it" in helpers.error_of(
            helpers.train, **keys("out", max_iters=6, lr_decay_iters=4, init_from="auto")
        )


def agent(port, keys, helpers):
    """One torchrun of two, as on one of two machines."""
    meet = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    meet += ["--rdzv-id=7", "--local-addr=127.0.0.1", "--max-restarts=3"]
    meet += ["--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=2"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *meet, "train.py", *helpers.words(**keys)],
        cwd=ROOT, env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def is_free(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def wait_until(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(process):
    said = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
    return [int(pid) for pid in said.split()]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_machine_that_is_lost_and_replaced_leaves_the_curve_of_one_process(keys, helpers, whole, parallel):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    out = keys("out")["out_dir"]
    agents = [agent(port, keys("out", init_from="auto", parallel=parallel), helpers)]
    wait_until(lambda: not is_free(port))  # the first one is where the others meet: it stays
    agents.append(agent(port, keys("out", init_from="auto", parallel=parallel), helpers))
    wait_for_step(out, 60, agents[0])
    lost = agents.pop()
    for pid in [*children(lost), lost.pid]:
        os.kill(pid, signal.SIGKILL)
    lost.communicate()
    agents.append(agent(port, keys("out", init_from="auto", parallel=parallel), helpers))
    said = [process.communicate(timeout=240)[0] for process in agents]
    assert [process.returncode for process in agents] == [0, 0], said
    assert f"resuming {out} at step 50" in "".join(said)
    check_same_curve(out, whole, helpers)


# ----------------------------------------------------------------------------------------------------------------------
# config/slurm, with stand-ins for SLURM's commands: srun starts the command once a machine, scancel signals it. JOB is
# how they know the job: in an array its task, and not SLURM_JOB_ID, which may be the number of the whole array

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
            *) exit 1 ;;
        esac
    """,
    "torchrun": f'exec {sys.executable} -m torch.distributed.run --local-addr=127.0.0.1 "$@"',
    "python": f'exec {sys.executable} "$@"',
}


@pytest.fixture
def sbatch(tmp_path):
    """sbatch(name, words, machines=2) starts the job script of that name."""
    (tmp_path / "bin").mkdir()
    for name, text in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = server.getsockname()[1] % 10_000  # the script makes a port of it

    def call(name, words, machines=1):
        environment = dict(SLURM_JOB_ID=str(job), SLURM_NNODES=str(machines), SLURM_JOB_NODELIST="n[1-2]")
        environment |= dict(SLURM_CPUS_PER_TASK="1", JOB=str(job))
        if "--array=" in (ROOT / "config" / "slurm" / name).read_text():
            environment |= dict(SLURM_ARRAY_JOB_ID=str(job), SLURM_ARRAY_TASK_ID="3", JOB=f"{job}_3")
        environment |= dict(STATE=str(tmp_path), PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        return subprocess.Popen(
            ["bash", ROOT / "config" / "slurm" / name, *words],
            cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return call


def test_a_slurm_job_on_two_machines_saves_when_its_time_ends_is_requeued_and_goes_on_on_one(
    keys, helpers, whole, sbatch, tmp_path
):
    out, words = keys("out")["out_dir"], helpers.words(**keys("out"))
    job = sbatch("train.sbatch", words, machines=2)
    wait_for_step(out, 20, job)
    job.send_signal(signal.SIGUSR1)
    said, _ = job.communicate(timeout=240)
    step = checkpoints.load(out)["iter_num"]
    assert job.returncode != 0 and (tmp_path / "requeued").is_file(), said
    assert 20 < step < 200 and f"SIGTERM: saved at step {step} of 200" in said
    assert helpers.losses(out) == pytest.approx(
        {s: loss for s, loss in helpers.losses(whole).items() if s < step}, rel=1e-3
    )
    (tmp_path / "requeued").unlink()
    job = sbatch("train.sbatch", words, machines=1)
    said, _ = job.communicate(timeout=240)
    assert job.returncode == 0 and f"resuming {out} at step {step}" in said, said
    assert not (tmp_path / "requeued").exists()
    check_same_curve(out, whole, helpers)


@pytest.mark.slow
def test_a_slurm_worker_of_an_experiment_stops_its_runs_which_save_and_is_requeued(helpers, sbatch, tmp_path):
    base = {name: value for name, value in helpers.tiny.items() if name != "threads"}
    base |= dict(max_iters=100_000, eval_interval=50_000)
    data = dict(seq_len=32, vocab_size=16, pairs=4, train_size=200, val_size=50)
    out = tmp_path / "shared"
    words = helpers.words(out_dir=out, arms={"none": {}}, base=base, data=data, exploratory=True)
    job = sbatch("experiment.sbatch", words)
    wait_for_step(out / "none-seed0", 5, job)
    job.send_signal(signal.SIGUSR1)
    said, _ = job.communicate(timeout=240)
    assert job.returncode == 143 and (tmp_path / "requeued").is_file(), said
    assert checkpoints.load(out / "none-seed0")["iter_num"] > 5
    runner.lock(out, "none-seed0").close()  # given back: another worker need not wait


@pytest.mark.parametrize("file", sorted((ROOT / "config" / "slurm").glob("*.sbatch")), ids=lambda file: file.name)
def test_the_job_scripts_are_bash_and_their_example_gives_keys_that_exist(file):
    assert subprocess.run(["bash", "-n", file]).returncode == 0
    text = file.read_text()
    (words,) = re.findall(rf"^#   sbatch config/slurm/{file.name} (.*)$", text, re.M)
    kind = train.TrainConfig if "train.py" in text else experiment.ExperimentConfig
    configurator.load(kind, words.split())
    assert ('train.py --init_from=auto "$@"' in text) == ("train.py" in text)  # the words come last, and win
    lines = re.findall(r"^#SBATCH (\S*)", text, re.M)
    assert {"--requeue", "--signal=B:USR1@300", "--open-mode=append"} <= set(lines)
    # SLURM reads these lines up to the first command
    assert text.rindex("#SBATCH") < re.search(r"^[^#\n]", text, re.M).start()


# ----------------------------------------------------------------------------------------------------------------------
# TensorBoard


def test_tensorboard_has_every_number_of_the_rows_once_also_after_a_kill(keys, helpers):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    case = dict(meters="true", eval_interval=4, lr_decay_iters=8, logger="tensorboard", gradient_accumulation_steps=1)
    out = helpers.train(**keys("out", max_iters=6, **case))
    with open(out / "metrics.jsonl", "a") as file:  # steps that a kill has undone
        file.write(json.dumps({"event": "train", "step": 6, "loss": 99.0}) + "\n")
    helpers.train(**keys("out", max_iters=8, init_from="auto", **case))
    board = accumulators.EventAccumulator(str(out / "tensorboard"), {"scalars": 0})
    board.Reload()
    found = {name: [(event.step, event.value) for event in board.Scalars(name)] for name in board.Tags()["scalars"]}
    rows = helpers.metrics(out, "train")
    assert found["train/loss"] == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows]
    assert [step for step, _ in found["train/loss"]] == list(range(8))
    evaluations = helpers.metrics(out, "eval")
    assert found["eval/val_loss"] == [(row["step"], pytest.approx(row["val_loss"], rel=1e-6)) for row in evaluations]
    branch = [(row["step"], pytest.approx(row["meters"]["branch"][0], rel=1e-6)) for row in evaluations]
    assert found["eval/meters/branch/0"] == branch
    assert [step for step, _ in found["end/val_loss"]] == [8]


def test_without_tensorboard_one_line_says_how_to_get_it_before_any_work(keys, helpers, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    message = helpers.error_of(helpers.train, **keys("out", logger="tensorboard"))
    assert message == "logger='tensorboard': it is not installed: pip install tensorboard"
    assert not (keys("out")["out_dir"] / "metrics.jsonl").exists()
