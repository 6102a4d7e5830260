"""Several processes hold the whole model or a shard of it, and train as one process does."""

import itertools
import json
import os
import re
import types
import weakref

import edits
import pytest
import torch
from test_cluster import Ranks
from torch.distributed.tensor import DTensor

import train
from base import configurator
from model import GPT, MIXERS, MLPS
from runs import checkpoint as checkpoints
from runs import memory, parallel
from runs.hardware import Processes, autocast

# three heads: two processes hold unequal parts of A_log. Two micro-steps for each process, with other numbers of labels
KEYS = dict(
    n_embd=24, n_head=3, gate="elementwise", gradient_accumulation_steps=4, max_iters=3, eval_interval=3,
    eval_tokens=700, meters=False, dropout=0.1,
)  # fmt: skip
ALL = dict(attention=",".join(MIXERS), n_layer=len(MIXERS))  # a layer of each mixer
WHOLE = dict(
    attention="gla,mamba2", max_iters=6, schedule="constant"
)  # this run is stopped at 3, and goes on elsewhere
HALF = WHOLE | dict(max_iters=3)
UNGATED = dict(attention="mamba2", gate="none")
MUON = dict(attention="gated_deltanet,softmax", optimizer="muon")
HEADS = MUON | dict(muon_split="head")
SPARSE = dict(attention="gla", mlp="sparse")  # in a step, some experts get no token of one process, or of any
NEW_GATE = dict(attention="mamba2", gate_activation="sigmoid2", gate_lr_scale=10, dtype="bfloat16", meters=True)
EVEN = dict(parallel="fsdp", n_embd=16, n_head=2, gate="none", gradient_accumulation_steps=2)
DEEP = EVEN | dict(n_layer=8, max_iters=1, eval_interval=1)
ROUNDED = ALL | dict(parallel="fsdp", dtype="bfloat16", max_iters=2, eval_interval=2, eval_whole=True)
RUNS = dict(  # those of two processes
    ddp=ALL | dict(parallel="ddp"), fsdp=ALL | dict(parallel="fsdp"),
    ddp_muon=MUON | dict(parallel="ddp"), fsdp_muon=MUON | dict(parallel="fsdp"),
    fsdp_heads=HEADS | dict(parallel="fsdp"),
    ddp_sparse=SPARSE | dict(parallel="ddp"), fsdp_sparse=SPARSE | dict(parallel="fsdp"),
    half=HALF | dict(parallel="fsdp", activation_checkpointing=True),
    new_gate=NEW_GATE | dict(parallel="fsdp"),
    even=EVEN,
    deep=DEEP, deep_rounded=DEEP | dict(dtype="bfloat16"),
    rounded=ROUNDED,
    bad=dict(parallel="fsdp", learning_rate=1e30, warmup_iters=0, grad_clip=0),
    solved=dict(stop_above=0, max_iters=50),
    goes_on=WHOLE | dict(parallel="fsdp", init_from="resume"),
)  # fmt: skip


# -- In each of the processes ------------------------------------------------------------------------------------------

NAMES = {  # of collectives in torch, the newer one first
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce": ("all_reduce",),
}
FOUND: dict = {}
SENT: dict = {}
BUFFERS: list = []


def count(collective):
    """From now on the function of torch.distributed adds the bytes of its whole tensor to SENT[collective]."""
    name = next(name for name in NAMES[collective] if hasattr(torch.distributed, name))
    function = getattr(torch.distributed, name)

    def call(*args, **keys):
        tensors = [x for x in (*args, *keys.values()) if isinstance(x, torch.Tensor)]
        # FSDP's are vectors; the loss and the number of labels are single numbers
        SENT[collective] = SENT.get(collective, 0) + max((x.nbytes for x in tensors if x.dim()), default=0)
        if collective == "all_gather":
            BUFFERS.extend(map(weakref.ref, tensors))
        return function(*args, **keys)

    setattr(torch.distributed, name, call)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(tensors):
    return sum(local(x).nbytes for x in tensors if isinstance(x, torch.Tensor) and x.dim())


def watch(model, optimizers):
    """Notes in FOUND, after each step, what this process holds and has sent since the step before."""
    dtypes, whole, most = set(), {}, [0]

    def seen_block(block, args):
        if not block.training:
            # FSDP keeps a weight that it lets go of, with a storage of no bytes
            whole.update({id(p): p for p in model.parameters() if not isinstance(p, DTensor)})
            buffers = [x.untyped_storage() for ref in BUFFERS if (x := ref()) is not None]
            storages = [*(p.untyped_storage() for p in whole.values()), *buffers]
            most[0] = max(most[0], sum({x.data_ptr(): x.nbytes() for x in storages}.values()))

    def seen_step(optimizer, args, keys):  # the gradients are there until the end of the step
        parameters = list(model.parameters())
        moments = [x for one in optimizers for state in one.state.values() for x in state.values()]
        bytes_of = dict(parameters=parameters, gradients=[p.grad for p in parameters], optimizer=moments)
        blocks = {local(p.grad).untyped_storage().data_ptr() for p in parameters}
        FOUND.update({name: held(tensors) for name, tensors in bytes_of.items()}, sent=dict(SENT))
        FOUND.update(blocks=len(blocks), A_log=sorted(dtypes), evaluation=most[0])
        SENT.clear()

    for module in model.modules():
        if hasattr(module, "A_log"):
            module.register_forward_pre_hook(lambda mixer, args: dtypes.add(str(mixer.A_log.dtype)))
    for block in model.blocks:
        block.register_forward_pre_hook(seen_block)
    optimizers[-1].register_step_post_hook(seen_step)
    return optimizers


def runs_in_turn(given):
    """Makes the runs, each the words of a command line, one after the other in these processes. Rank 0 writes to the
    file, for each run, its exit status and what every process has FOUND: what it held in its last step and had sent
    since the step before, in bytes; the number of memory blocks that gradients lay in; the dtypes of A_log in the
    forward pass; the bytes of whole weights and of the buffers that they arrived in, the most in a block's turn of an
    evaluation; the most that a process had at once until it had the weights and moments of its checkpoint.
    """
    runs, file = given
    MLPS["sparse"] = edits.Sparse
    counting, found = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True), []
    make_optimizers, restore = train.make_optimizers, train.restore

    def restore_and_count(saved, model, optimizers, file, *rest):
        restore(saved, model, optimizers, file, *rest)
        counting.stop()
        events = counting.profiler.kineto_results.events()
        sizes, mapped = [event.nbytes() for event in events if event.name() == "[memory]"], os.path.getsize(file)
        FOUND["resumed"] = {"mapped": sizes.count(mapped), "made": max(itertools.accumulate(sizes)) - mapped}

    train.make_optimizers = lambda model, *args: watch(model, make_optimizers(model, *args))
    train.restore = restore_and_count
    for collective in NAMES:
        count(collective)
    with Processes("cpu", 1) as processes:
        for words in runs:
            FOUND.clear()
            status = 0
            if "--init_from=resume" in words:  # until its tensors are restored
                counting.start()
            try:
                start = train.where_to_start(configurator.read_words(train.TrainConfig, words))
                train.train_from(start, processes)
            except SystemExit as ended:
                status = ended.code
            found.append({"status": status, "held": processes.from_all(FOUND)})
        if processes.is_main:
            file.write_text(json.dumps(found))


# -- The runs, and how two are compared --------------------------------------------------------------------------------


def made_in_turn(runs, folder, helpers, processes=2):
    """Makes the runs [keys] in so many processes. Returns [{"status", "held"}] of each run, and what they printed."""
    folder.mkdir()
    words = [helpers.words(**helpers.tiny | keys) for keys in runs]
    ranks = Ranks(processes, runs_in_turn, (words, folder / "found.json"), folder / "said.txt")
    assert ranks.end() == [0] * processes, ranks.said.read_text()
    return json.loads((folder / "found.json").read_text()), ranks.said.read_text()


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
    """(name -> {"folder", "status", "held"} of each of RUNS, what they printed)"""
    ungated = alone("ungated", **UNGATED)
    start("goes_on")["out_dir"].symlink_to(alone("whole half", **HALF))  # the run of one process goes on under two
    runs = [start(name, **keys | ({"init_from": ungated} if name == "new_gate" else {})) for name, keys in RUNS.items()]
    ended, said = made_in_turn(runs, start("said")["out_dir"], helpers)
    return {name: one | {"folder": start(name)["out_dir"]} for name, one in zip(RUNS, ended, strict=True)}, said


def check_same_curve(ours, theirs, helpers):
    assert helpers.losses(ours) == pytest.approx(helpers.losses(theirs), rel=1e-5)
    for event, name in (("train", "grad_norm"), ("eval", "val_loss"), ("eval", "accuracy"), ("eval", "labels")):
        one, other = ([row[name] for row in helpers.metrics(out, event)] for out in (ours, theirs))
        assert one == pytest.approx(other, rel=1e-4), name


def form(tree):
    """The kinds and shapes of what a checkpoint holds; a tensor takes no more of the file than padding."""
    if isinstance(tree, dict):
        return type(tree), {name: form(value) for name, value in tree.items()}
    if isinstance(tree, torch.Tensor):
        row = tree.nbytes // max(1, len(tree)) if tree.dim() else 0  # of two unequal shards one was padded
        assert tree.untyped_storage().nbytes() < tree.nbytes + row + 100
        return tree.dtype, tree.shape, tree.device, tree.stride(), tree.requires_grad
    return type(tree)


# -- The losses are those of one process, and the checkpoint is one file that goes on anywhere -------------------------


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "ddp_muon", "fsdp_muon", "fsdp_heads"])
def test_every_mixer_and_muon_have_the_losses_of_one_process_and_its_form_of_a_checkpoint(kind, of_two, alone, helpers):
    folder = of_two[0][kind]["folder"]
    name = kind.partition("_")[2] or "all"
    whole = alone(name, **dict(muon=MUON, heads=HEADS, all=ALL)[name])
    check_same_curve(folder, whole, helpers)
    ours, theirs = (checkpoints.load(out) for out in (folder, whole))
    assert form(ours) == form(theirs) and theirs["model"]["blocks.0.norm_1.weight"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["ddp_sparse", "fsdp_sparse"])
def test_experts_that_get_no_token_in_a_step_have_the_losses_of_one_process(kind, of_two, alone, helpers, monkeypatch):
    monkeypatch.setitem(MLPS, "sparse", edits.Sparse)
    check_same_curve(of_two[0][kind]["folder"], alone("sparse", **SPARSE), helpers)


def test_a_gate_that_is_new_to_a_checkpoint_trains_the_same_in_shards_and_decays_stay_float32(of_two, alone, helpers):
    whole = alone("new gate alone", **NEW_GATE, init_from=alone("ungated", **UNGATED))
    run, sharded = of_two[0]["new_gate"], of_two[0]["new_gate"]["folder"]
    assert helpers.losses(sharded) == pytest.approx(helpers.losses(whole), rel=1e-3)  # products are in bfloat16
    ours, theirs = (helpers.metrics(out, "eval")[-1]["meters"] for out in (sharded, whole))
    assert ours["sink"] == pytest.approx(theirs["sink"], rel=0.01) and ours.keys() == theirs.keys()
    assert [seen["A_log"] for seen in run["held"]] == [["torch.float32"]] * 2  # gathered, on the way forward
    ours, theirs = (checkpoints.load(out)["model"]["blocks.0.mixer.A_log"] for out in (sharded, whole))
    assert ours.dtype == torch.float32 and (ours != ours.bfloat16()).any()
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-3)


def test_weights_that_are_gathered_in_bfloat16_give_the_losses_of_those_that_autocast_rounds(of_two, alone, helpers):
    whole = alone("rounded alone", **ROUNDED)
    check_same_curve(of_two[0]["rounded"]["folder"], whole, helpers)


def test_all_ranks_end_where_a_step_is_bad_whose_tensor_is_found_in_shards_or_where_the_run_is_solved(of_two, helpers):
    words = "error: .* is not finite at step 1, .* first bad tensor: gradient of blocks.1.mlp.down.weight"
    assert of_two[0]["bad"]["status"] == 1 and re.search(words, of_two[1])
    folder = of_two[0]["solved"]["folder"]
    rows, end = helpers.metrics(folder, "eval"), helpers.metrics(folder)[-1]
    assert len(rows) >= 2 and all(row["accuracy"] > 0 for row in rows[-2:])
    assert end["event"] == "end" and end["step"] == rows[-1]["step"] == checkpoints.load(folder)["iter_num"] < 50


def test_a_run_that_two_processes_saved_goes_on_in_one_and_the_other_way_round(of_two, alone, start, helpers):
    helpers.train(**start("half", **WHOLE, parallel="ddp", init_from="resume"))
    for name in ("half", "goes_on"):
        check_same_curve(of_two[0][name]["folder"], alone("whole", **WHOLE), helpers)


def test_a_process_that_goes_on_copies_its_shard_of_the_checkpoint_and_maps_the_rest(of_two):
    run = of_two[0]["goes_on"]
    weights, _, _ = sizes_of(train.TrainConfig(**checkpoints.load(run["folder"])["config"]))
    for seen in run["held"]:  # half of the weights, gradients and moments make 2; whole moments would be 2 more
        assert seen["resumed"]["mapped"] == 1 and seen["resumed"]["made"] < 3 * weights


@pytest.mark.slow
def test_four_processes_go_on_from_two_in_any_way(of_two, alone, start, tmp_path, helpers):
    """As four shards, of which two have no part of a vector of two, and under ddp."""
    for i, way in enumerate((dict(parallel="fsdp"), dict(parallel="ddp"))):
        half = start(f"four {i}", **HALF, **way)
        two, _ = made_in_turn([half | dict(parallel="fsdp")], tmp_path / f"two {i}", helpers)
        goes_on = start(f"four {i}", **WHOLE, **way, init_from="resume")
        four, _ = made_in_turn([goes_on], tmp_path / f"four {i}", helpers, processes=4)
        assert two[0]["status"] == four[0]["status"] == 0
        check_same_curve(half["out_dir"], alone("whole", **WHOLE), helpers)


def test_blocks_that_are_computed_again_give_the_same_bits():
    keys = ALL | dict(gate="elementwise", n_embd=16, n_head=2, block_size=16, vocab_size=11, dropout=0.1)
    alone, gradients, calls = types.SimpleNamespace(device="cpu", device_type="cpu", world_size=1), [], []
    for is_on in (False, True):
        config = train.TrainConfig(**keys, activation_checkpointing=is_on)
        torch.manual_seed(0)
        model = parallel.share_out(GPT(config), config, alone, False, "bfloat16")
        for block in model.blocks:
            block.mixer.register_forward_hook(lambda *_: calls.append(1))
        idx = torch.randint(11, (2, 16), generator=torch.Generator().manual_seed(1))
        with autocast("cpu", "bfloat16"):
            loss = model(idx, idx)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert len(calls) == (1 + 2) * len(MIXERS)  # each block once more, on the way back
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# -- What a process holds and sends ------------------------------------------------------------------------------------


def sizes_of(config):
    """(W, E, B) of docs/scale.md: bytes of the weights, of what is no block's, and of the largest block."""
    model = memory.without_data(config)
    of_blocks = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    weights = sum(p.nbytes for p in model.parameters())
    return weights, weights - sum(of_blocks), max(of_blocks)


@pytest.mark.parametrize("name", ["even", "fsdp"])
def test_processes_hold_and_send_what_the_arithmetic_says(name, of_two):
    run = of_two[0][name]
    config = train.TrainConfig(**checkpoints.load(run["folder"])["config"])
    weights, shell, _ = sizes_of(config)
    held = [[seen[part] for part in ("parameters", "gradients", "optimizer")] for seen in run["held"]]
    whole = [weights, weights, weights * 2]
    # blocks are gathered on the way forward and once more on the way back; what is no block's stays in between
    gathered = config.gradient_accumulation_steps // 2 * (2 * weights - shell)
    assert [sum(parts) for parts in zip(*held, strict=True)] == whole
    for seen, parts in zip(run["held"], held, strict=True):
        sent = {collective: size for collective, size in seen["sent"].items() if size}
        if name == "fsdp":  # unequal shards; what is padded is sent, too
            assert sent["all_gather"] == pytest.approx(gathered, rel=0.05)
        else:
            assert sent == {"all_gather": gathered, "reduce_scatter": weights}
            assert parts == [size / 2 for size in whole]


def test_the_gradients_of_ddp_lie_in_its_buckets(of_two):
    for seen in of_two[0]["ddp"]["held"]:
        assert seen["blocks"] == 1 and seen["gradients"] == seen["parameters"]


def test_an_evaluation_holds_two_blocks_whole_and_never_the_model(of_two):
    """The block whose turn it is, and the buffer that it came in; in bfloat16 these are as large as one. A busy machine
    once held more: a buffer that is being filled or let go of is one more block."""
    config = train.TrainConfig(**checkpoints.load(of_two[0]["deep"]["folder"])["config"])
    weights, shell, block = sizes_of(config)
    matrices = sum(p.nbytes for p in memory.without_data(config).blocks[0].parameters() if p.dim() > 1)
    held = {"deep": shell + 2 * block, "deep_rounded": shell + config.n_layer * (block - matrices) + matrices}
    assert max(held.values()) + block < weights / 2
    for name, expected in held.items():
        assert all(expected <= seen["evaluation"] <= expected + block for seen in of_two[0][name]["held"])
