"""Several runs of train.py, one after the other, in the same processes, which test_parallel.py forks.

main((runs, file)): each of the runs is the words of a command line. Rank 0 writes a list to the file, for each run its
exit status, and what every process held in its last step and had sent since the step before, {"parameters": bytes, ...,
"sent": {collective: bytes}}; the number of memory blocks that gradients lay in, {"blocks": n}; the dtypes of A_log in
the forward pass, {"A_log": [dtype]}; the bytes of whole weights and of the buffers that they arrived in, the most in a
block's turn of an evaluation, {"evaluation": bytes}. "resumed" has the most bytes of tensors that a process had at once
until it had the weights and moments of its checkpoint, {"mapped", "made"}.
"""

import itertools
import json
import os
import weakref
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import configurator
import train
from runs.hardware import Processes
from runs.parallel import rows_of
from runs.resume import where_to_start

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


def held(tensors):
    return sum(rows_of(x, x).nbytes for x in tensors if isinstance(x, torch.Tensor) and x.dim())


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
        blocks = {rows_of(p.grad, p.grad).untyped_storage().data_ptr() for p in parameters}
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


def main(given):
    runs, file = given
    counting, found = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True), []
    make_optimizers, restore = train.make_optimizers, train.restore

    def restore_and_count(saved, optimizers, file, *rest):
        restore(saved, optimizers, file, *rest)
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
                config, *rest = where_to_start(configurator.read_words(train.TrainConfig, words))
                train.run(config, processes, *rest)
            except SystemExit as ended:
                status = ended.code
            found.append({"status": status, "held": processes.from_all(FOUND)})
        if processes.is_main:
            Path(file).write_text(json.dumps(found))
