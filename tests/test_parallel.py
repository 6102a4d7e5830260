"""Several processes hold the whole model or a shard of it, and train as one process does.

    python -m pytest tests/test_parallel.py
    python -m pytest tests/test_parallel.py -m slow      four processes, two replicas of two shards

The runs of several processes are made one after the other in the same processes (runs_in_turn.py).
"""

import copy
import dataclasses
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import evaluate
import train
from model import GPT, MIXERS, GPTConfig
from runs import checkpoint as checkpoints
from runs import memory, parallel
from runs.finite import first_bad_tensor
from runs.hardware import autocast
from runs.probe import training_meters

ROOT = Path(__file__).resolve().parents[1]
# three heads: two processes hold unequal parts of A_log. Two micro-steps for each process, with other numbers of labels
KEYS = dict(
    n_embd=24, n_head=3, gate="elementwise", gradient_accumulation_steps=4, max_iters=3, eval_interval=3,
    eval_tokens=700, meters=False, dropout=0.1,
)  # fmt: skip
ALL = dict(attention=",".join(MIXERS), n_layer=len(MIXERS))  # a layer of each mixer
WHOLE = dict(attention="gla,mamba2", max_iters=6)  # this run is stopped at 3, and goes on elsewhere
HALF = WHOLE | dict(max_iters=3, lr_decay_iters=6)
UNGATED = dict(attention="mamba2", gate="none")
NEW_GATE = dict(attention="mamba2", gate_activation="sigmoid2", new_lr_scale=10, dtype="bfloat16", meters=True)
RUNS = dict(  # those of two processes
    ddp=ALL | dict(parallel="ddp"),
    fsdp=ALL | dict(parallel="fsdp"),
    half=HALF | dict(parallel="fsdp", activation_checkpointing=True),
    new_gate=NEW_GATE | dict(parallel="fsdp"),
    float16=dict(parallel="fsdp", dtype="float16", max_iters=2),
    diverges=dict(parallel="fsdp", learning_rate=1e30, warmup_iters=0, decay_lr=False),
    even=dict(parallel="fsdp", n_embd=16, n_head=2, gate="none", gradient_accumulation_steps=2),
    one_shard=dict(parallel="fsdp", n_embd=16, n_head=2, gate="none", gradient_accumulation_steps=2, shards=1),
    solved=dict(stop_above=0, max_iters=50),
    goes_on=WHOLE | dict(parallel="fsdp", init_from="resume"),
)


def runs_in_turn(runs, helpers, processes=2):
    """Makes the runs [keys] under one torchrun. Returns [{"status", "held"}] of each run, and what was complained."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    words = [helpers.words(**helpers.tiny | keys) for keys in runs]
    ended = helpers.script(*launch, ROOT / "tests" / "runs_in_turn.py", json.dumps(words))
    assert ended.returncode == 0, ended.stderr.decode()
    return [json.loads(line) for line in re.findall(r"^run (.*)$", ended.stdout.decode(), re.M)], ended.stderr.decode()


@pytest.fixture(scope="module")
def start(mixed_mqar, tmp_path_factory, helpers):
    """start(name, **keys): the keys of a run in a folder of that name."""
    folder = tmp_path_factory.mktemp("runs")
    return lambda name, **keys: KEYS | dict(dataset=mixed_mqar, out_dir=folder / name) | keys


@pytest.fixture(scope="module")
def alone(start, helpers):
    """alone(name, **keys): the folder of a run of one process; each is made once."""
    made = {}

    def make(name, **keys):
        if name not in made:
            made[name] = helpers.train(**start(name, **keys))
        return made[name]

    return make


@pytest.fixture(scope="module")
def of_two(start, alone, helpers):
    """(name -> {"folder", "status", "held"} of each of RUNS, what they complained)"""
    ungated = alone("ungated", **UNGATED)
    start("goes_on")["out_dir"].symlink_to(alone("whole half", **HALF))  # the run of one process goes on under two
    runs = [start(name, **keys | ({"init_from": ungated} if name == "new_gate" else {})) for name, keys in RUNS.items()]
    ended, complained = runs_in_turn(runs, helpers)
    folders = {name: dict(folder=start(name)["out_dir"]) for name in RUNS}
    return {name: folders[name] | one for name, one in zip(RUNS, ended, strict=True)}, complained


def check_same_curve(ours, theirs, helpers):
    assert helpers.losses(ours) == pytest.approx(helpers.losses(theirs), rel=1e-5)
    for event, name in (("train", "grad_norm"), ("eval", "val_loss"), ("eval", "accuracy"), ("eval", "labels")):
        one, other = ([row[name] for row in helpers.metrics(out, event)] for out in (ours, theirs))
        assert one == pytest.approx(other, rel=1e-4), name


# ----------------------------------------------------------------------------------------------------------------------
# The losses are those of one process


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_mixer_has_the_losses_of_one_process(kind, of_two, alone, helpers):
    check_same_curve(of_two[0][kind]["folder"], alone("all", **ALL), helpers)


def test_in_one_process_fsdp_changes_nothing(alone, start, helpers, capsys):
    same = helpers.train(**start("one", **UNGATED, parallel="fsdp", shards=4))
    assert "fsdp: one process has nothing to share out" in capsys.readouterr().out
    ours, theirs = (checkpoints.load(out) for out in (same, alone("ungated", **UNGATED)))
    assert helpers.equal(ours["model"], theirs["model"]) and helpers.equal(ours["optimizer"], theirs["optimizer"])


def test_a_gate_that_is_new_to_a_checkpoint_trains_the_same_in_shards_and_decays_stay_float32(of_two, alone, helpers):
    whole = alone("new gate alone", **NEW_GATE, init_from=alone("ungated", **UNGATED))
    run, sharded = of_two[0]["new_gate"], of_two[0]["new_gate"]["folder"]
    assert helpers.losses(sharded) == pytest.approx(helpers.losses(whole), rel=1e-3)  # products are in bfloat16
    ours, theirs = (helpers.metrics(out, "eval")[-1]["meters"] for out in (sharded, whole))
    assert ours["sink"] == pytest.approx(theirs["sink"], rel=0.01) and ours.keys() == theirs.keys()
    assert checkpoints.load(sharded)["new"] == checkpoints.load(whole)["new"] != []
    assert [seen["A_log"] for seen in run["held"]] == [["torch.float32"]] * 2  # gathered, on the way forward
    ours, theirs = (checkpoints.load(out)["model"]["blocks.0.mixer.A_log"] for out in (sharded, whole))
    assert ours.dtype == torch.float32 and (ours != ours.bfloat16()).any()
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-3)


def test_float16_scales_its_loss_in_shards(of_two, alone, helpers, slow_dtypes):
    whole = alone("float16 alone", dtype="float16", max_iters=2)
    assert helpers.losses(of_two[0]["float16"]["folder"]) == pytest.approx(helpers.losses(whole), rel=1e-3)
    scalers = [checkpoints.load(out)["scaler"] for out in (of_two[0]["float16"]["folder"], whole)]
    assert scalers[0] == scalers[1]


def test_a_run_in_shards_that_diverges_ends_and_names_a_tensor(of_two):
    found, complained = of_two
    assert found["diverges"]["status"] == 1
    assert re.search(r"error: .* at step \d, learning rate 1e\+30; first bad tensor: ", complained)


def test_all_ranks_end_where_the_run_is_solved(of_two, helpers):
    folder = of_two[0]["solved"]["folder"]
    rows, end = helpers.metrics(folder, "eval"), helpers.metrics(folder)[-1]
    assert len(rows) >= 2 and all(row["accuracy"] > 0 for row in rows[-2:])
    assert end["event"] == "end" and end["step"] == rows[-1]["step"] == checkpoints.load(folder)["iter_num"] < 50


def test_shards_that_do_not_divide_the_processes_are_refused(helpers):
    config = train.TrainConfig(parallel="fsdp", shards=3)
    error = helpers.error_of(parallel.shards_of, config, 4)
    assert error == "shards=3: must divide the 4 processes; --shards=0 takes all of them"
    for shards, expected in ((0, 4), (1, 1), (2, 2)):
        assert parallel.shards_of(dataclasses.replace(config, shards=shards), 4) == expected
    assert parallel.shards_of(config, 1) == parallel.shards_of(train.TrainConfig(shards=3), 4) == 1


# ----------------------------------------------------------------------------------------------------------------------
# The checkpoint is one file that goes on anywhere


def form(tree):
    """The kinds and shapes of what a checkpoint holds; a tensor takes no more of the file than padding beside it."""
    if isinstance(tree, dict):
        return type(tree), {name: form(value) for name, value in tree.items()}
    if isinstance(tree, torch.Tensor):
        assert tree.untyped_storage().nbytes() < tree.nbytes + 100
        return tree.dtype, tree.shape, tree.device, tree.stride(), tree.requires_grad
    return type(tree)


def test_checkpoints_of_all_kinds_have_one_form_and_start_with_the_same_bits(of_two, alone, helpers):
    folders = alone("all", **ALL), of_two[0]["ddp"]["folder"], of_two[0]["fsdp"]["folder"]
    for file in ("ckpt_0.pt", "ckpt.pt"):
        whole, ddp, fsdp = (checkpoints.load(folder / file) for folder in folders)
        assert form(whole) == form(ddp) == form(fsdp)
        if file == "ckpt_0.pt":
            for part in ("model", "optimizer", "rng", "scaler", "new", "model_args"):
                assert helpers.equal(whole[part], ddp[part]) and helpers.equal(whole[part], fsdp[part]), part
    assert whole["model"]["blocks.0.norm_1.weight"].dtype == torch.float32


def test_a_run_that_two_processes_saved_in_shards_goes_on_in_one_and_the_other_way_round(of_two, alone, start, helpers):
    helpers.train(**start("half", **WHOLE, parallel="ddp", init_from="resume"))
    for name in ("half", "goes_on"):
        check_same_curve(of_two[0][name]["folder"], alone("whole", **WHOLE), helpers)


def test_evaluate_reads_the_checkpoint_of_shards(of_two, helpers, capsys):
    folder = of_two[0]["fsdp"]["folder"]
    evaluate.main([f"--checkpoint={folder}", "--device=cpu", "--threads=1"])
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    assert loss == pytest.approx(helpers.metrics(folder, "end")[-1]["val_loss"], rel=1e-5)


@pytest.mark.slow
def test_four_processes_go_on_from_two_in_any_way(of_two, alone, start, helpers):
    """As two replicas of two shards, as four shards, of which two have no part of a vector of two, and under ddp."""
    for way in (dict(parallel="fsdp", shards=2), dict(parallel="fsdp"), dict(parallel="ddp")):
        name = f"four {way}"
        half = start(name, **HALF, **way)
        two, _ = runs_in_turn([half | dict(parallel="fsdp", shards=0)], helpers)
        four, _ = runs_in_turn([start(name, **WHOLE, **way, init_from="resume")], helpers, processes=4)
        assert two[0]["status"] == four[0]["status"] == 0
        check_same_curve(half["out_dir"], alone("whole", **WHOLE), helpers)


# ----------------------------------------------------------------------------------------------------------------------
# activation_checkpointing


def test_blocks_that_are_computed_again_give_the_same_bits():
    keys = ALL | dict(gate="elementwise", n_embd=16, n_head=2, block_size=16, vocab_size=11)
    gradients, calls = [], []
    for is_on in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(**keys, dropout=0.1))
        for block in model.blocks:
            block.mixer.register_forward_hook(lambda *_: calls.append(1))
            if is_on:
                parallel.recompute(block)
        idx = torch.randint(11, (2, 16), generator=torch.Generator().manual_seed(1))
        with autocast("cpu", "bfloat16"):
            loss = model(idx, idx)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert len(calls) == (1 + 2) * len(MIXERS)  # each block once more, on the way back
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("sharded", [False, True])
def test_blocks_are_compiled_one_by_one_where_something_stands_between_them(sharded, monkeypatch):
    compiled, fake = [], lambda function: compiled.append(function) or function
    monkeypatch.setattr(torch, "compile", fake)
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda module, mesh: module)
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *_, **__: None)
    model = GPT(GPTConfig(n_layer=3, n_embd=8, n_head=1, block_size=8, vocab_size=5))
    config = train.TrainConfig(parallel="fsdp", activation_checkpointing=not sharded)
    processes = SimpleNamespace(world_size=2 if sharded else 1, device_type="cpu", device="cpu")
    assert parallel.share_out(model, config, processes, compiled=True) is model
    assert [function.__self__ for function in compiled] == list(model.blocks)


def test_meters_see_into_blocks_that_are_compiled_and_computed_again(monkeypatch):
    """Evaluations of two sizes come first: by then a graph that fits the meters' rows is made, without their hooks."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(n_layer=2, n_embd=16, n_head=2, block_size=16, vocab_size=11, gate="elementwise"))
        config = train.TrainConfig(activation_checkpointing=True)
        processes = SimpleNamespace(world_size=1, device_type="cpu", device="cpu")
        step_model = parallel.share_out(model, config, processes, is_compiled)
        idx = torch.randint(11, (6, 16), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            for n in (6, 3):
                parallel.unsharded(model).eval().features(idx[:n])
        model.train()
        loss = step_model(idx, idx)
        loss.backward()
        found.append(training_meters(parallel.unsharded(model), idx[:4], idx[:4], {}, "float32"))
        assert first_bad_tensor(parallel.unsharded(model), iter([])) is None and model.wte.weight.grad is not None
        assert all(a is b for a, b in zip(parallel.unsharded(model).parameters(), model.parameters(), strict=True))
    torch._dynamo.reset()
    assert found[0]["branch"] == pytest.approx(found[1]["branch"]) and found[0]["gate_mean"] == found[1]["gate_mean"]


def test_a_whole_model_has_the_buffers_of_the_sharded_one():
    model = GPT(GPTConfig(n_layer=2, n_embd=16, n_head=2, block_size=16, vocab_size=11))
    for block in model.blocks:  # as in the mixer of the README
        block.mixer.register_buffer("slope", torch.arange(3.0))
        block.mixer.register_buffer("table", torch.arange(4.0), persistent=False)
    model.unshard = None  # FSDP's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "GPT", lambda config: copy.deepcopy(model).to("meta"))
        twin = parallel.unsharded(model)
    assert twin is not model and not any(t.is_meta for t in [*twin.parameters(), *twin.buffers()])
    assert twin.blocks[1].mixer.slope.tolist() == [0, 1, 2] and twin.blocks[1].mixer.table.tolist() == [0, 1, 2, 3]


# ----------------------------------------------------------------------------------------------------------------------
# What a process holds and sends


def collectives(config, world_size):
    """{collective: bytes of the whole tensors that it makes in a step}, as docs/scale.md says."""
    weights, shards = memory.held(config, 1)["parameters"], parallel.shards_of(config, world_size)
    if config.parallel == "ddp":
        return {"all_reduce": weights}
    # blocks are gathered on the way forward and once more on the way back; what is no block's stays in between
    gathered = config.gradient_accumulation_steps // world_size * (2 * weights - memory.sizes_of(config)[0])
    made = {"all_gather": (shards, gathered), "reduce_scatter": (shards, weights)}
    made["all_reduce"] = (world_size // shards, weights / shards)
    return {name: size for name, (n, size) in made.items() if n > 1}


@pytest.mark.parametrize("name", ["even", "one_shard"])
def test_processes_hold_and_send_what_the_arithmetic_says(name, of_two):
    run = of_two[0][name]
    config = train.TrainConfig(**checkpoints.load(run["folder"])["config"])
    held = {part: size for part, size in memory.held(config, 2).items() if part != "gathered"}
    sent = collectives(config, 2)
    for seen in run["held"]:
        assert {collective: size for collective, size in seen.pop("sent").items() if size} == sent
        assert seen == held


def test_unequal_shards_are_the_whole_together_and_micro_steps_gather_again(of_two):
    run = of_two[0]["fsdp"]
    config = train.TrainConfig(**checkpoints.load(run["folder"])["config"])
    together = {part: sum(seen[part] for seen in run["held"]) for part in ("parameters", "gradients", "optimizer")}
    weights = memory.held(config, 1)["parameters"]
    assert together == {"parameters": weights, "gradients": weights, "optimizer": 2 * weights}
    # what is padded is sent, too
    assert run["held"][0]["sent"]["all_gather"] == pytest.approx(collectives(config, 2)["all_gather"], rel=0.05)


def test_the_document_s_example_is_what_a_process_holds():
    keys = dict(n_layer=18, n_head=16, n_embd=2048, vocab_size=50_304, batch_size=8)
    config = train.TrainConfig(**keys, gradient_accumulation_steps=8)
    with torch.device("meta"):
        size = 4 * GPT(GPTConfig(**{name: value for name, value in keys.items() if name != "batch_size"})).n_params()
    held = memory.held(config, 8)
    assert held == {"parameters": size, "gradients": 2 * size, "optimizer": 2 * size}
    assert memory.held(config, 1) == held | {"gradients": size}  # DDP keeps a copy
    sharded = memory.held(dataclasses.replace(config, parallel="fsdp"), 8)
    assert {name: 8 * sharded[name] for name in held} == held | {"gradients": size}
    micro_steps = dataclasses.replace(config, parallel="fsdp", gradient_accumulation_steps=16)
    assert memory.held(micro_steps, 8) == sharded | {"gradients": size}
    for world_size, shards in ((64, 8), (16, 16)):  # replicas hold no less
        changed = dataclasses.replace(config, parallel="fsdp", shards=shards, gradient_accumulation_steps=world_size)
        assert memory.held(changed, world_size)["parameters"] == size / shards
    activations = memory.activations_at_least(config, "bfloat16", 8 * 1024)
    text = (ROOT / "docs" / "scale.md").read_text()
    for row in (held, sharded):
        cells = [f"{row.get(name, 0) / 1e9:.2f}" for name in ("parameters", "gradients", "optimizer", "gathered")]
        assert f"| {' | '.join([*cells, f'{activations / 1e9:.2f}'])} |" in text
