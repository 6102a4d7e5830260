"""Several runs of train.py, one after the other, in the same processes: test_parallel.py starts this under torchrun.

runs_in_turn.py JSON, a list of the words of each command line. Rank 0 prints a line of JSON for each run: its exit
status, and what every process held after its first step, {"parameters": bytes, ..., "sent": {collective: bytes}};
the number of memory blocks that gradients lie in after the last one, {"blocks": n}; the dtypes of A_log in the forward
pass, {"A_log": [dtype]}, where mixers have one; the bytes of whole weights and of the buffers that they arrived in, the
most in a block's turn of an evaluation, {"evaluation": bytes}. "resumed" has the most bytes of tensors that each
process had at once until it had the weights and moments of its checkpoint, {"mapped", "made"}.
"""

import itertools
import json
import os
import sys
import weakref
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import configurator  # noqa: E402
import train  # noqa: E402
from runs.hardware import Processes  # noqa: E402
from runs.parallel import rows_of  # noqa: E402
from runs.resume import where_to_start  # noqa: E402

SENT: dict = {}
BUFFERS: list = []
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


def count(collective, name):
    """From now on the function of torch.distributed adds the bytes of its whole tensor to SENT[collective]."""
    function = getattr(torch.distributed, name)

    def call(*args, **keys):
        # FSDP's are vectors; the loss and the number of labels are single numbers
        vectors = [x.nbytes for x in (*args, *keys.values()) if isinstance(x, torch.Tensor) and x.dim()]
        SENT[collective] = SENT.get(collective, 0) + max(vectors, default=0)
        if collective == "all_gather":
            BUFFERS.extend(weakref.ref(x) for x in (*args, *keys.values()) if isinstance(x, torch.Tensor))
        return function(*args, **keys)

    setattr(torch.distributed, name, call)


def held(tensors):
    return sum(rows_of(x).nbytes for x in tensors if isinstance(x, torch.Tensor) and x.dim())


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
        seen = {name: held(tensors) for name, tensors in bytes_of.items()} | {"sent": dict(SENT)}
        FOUND.append(seen | ({"A_log": sorted(dtypes)} if dtypes else {}))
        FOUND[0]["evaluation"] = most[0]
        FOUND[0]["blocks"] = len({rows_of(p.grad).untyped_storage().data_ptr() for p in parameters})

    for module in model.modules():
        if hasattr(module, "A_log"):
            module.register_forward_pre_hook(lambda mixer, args: dtypes.add(str(mixer.A_log.dtype)))
    for block in model.blocks:
        block.register_forward_pre_hook(seen_block)
    optimizers[-1].register_step_post_hook(seen_step)
    return optimizers


def first_loss(model, config, dtype, step, batch):
    if batch[0] < WORLD_SIZE:  # the first micro-step of this process: an evaluation may have come before it
        SENT.clear()
    return micro_loss(model, config, dtype, step, batch)


def restore_and_count(saved, optimizers, file, *rest):
    restore(saved, optimizers, file, *rest)
    counting.stop()
    events = counting.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    mapped = os.path.getsize(file)
    RESUMED.append({"mapped": sizes.count(mapped), "made": max(itertools.accumulate(sizes)) - mapped})


FOUND: list = []
RESUMED: list = []
restore, train.restore = train.restore, restore_and_count
make_optimizers, micro_loss = train.make_optimizers, train.micro_loss
train.make_optimizers = lambda model, *args: watch(model, make_optimizers(model, *args))
train.micro_loss = first_loss
OLDER = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
for collective in ("all_gather", "reduce_scatter", "all_reduce"):
    newer = "all_reduce" if collective == "all_reduce" else f"{collective}_single"
    count(collective, newer if hasattr(torch.distributed, newer) else OLDER[collective])
with Processes("cpu", 1) as processes:
    for words in json.loads(sys.argv[1]):
        FOUND.clear()
        RESUMED.clear()
        status = 0
        counting = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        if "--init_from=resume" in words:  # until its tensors are restored
            counting.start()
        try:
            config, *rest = where_to_start(configurator.read_words(train.TrainConfig, words))
            train.run(config, processes, *rest)
        except SystemExit as ended:
            status = ended.code
        every = processes.from_all(FOUND[0] if FOUND else None)
        resumed = processes.from_all(RESUMED[:1])
        if processes.is_main:
            print("run " + json.dumps({"status": status, "held": every, "resumed": resumed}), flush=True)
