"""How several processes share a run: under ddp each holds the whole model, under fsdp a shard of it (FSDP2).

    step_model = share_out(model, config, processes, compiled)   # before an optimizer takes the model's parameters
    with no_sync(step_model, unless=is_last): ...                # a backward pass inside
    model, state = unsharded(model), gathered(state, is_main)    # every process has to make these calls

In one process nothing is shared out, whatever the keys: the model stays as it is. What these calls return then is what
they were given, and train.py has one way for all kinds. Between blocks, an FSDP model holds one block and what is no
block's (the embedding, the last norm) whole; evaluations and meters read a copy that holds everything (`unsharded`).
They read one, too, where blocks are compiled: torch.compile keeps no promise to call the hooks of modules in a block.
"""

import contextlib
import copy
import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from configurator import UserError
from model import GPT
from ops.layers import Angles


def is_sharded(config, world_size: int) -> bool:
    return world_size > 1 and config.parallel == "fsdp"


def shards_of(config, world_size: int) -> int:
    """How many processes share one copy of the weights, gradients and moments. Raises UserError."""
    shards = config.shards or world_size if is_sharded(config, world_size) else 1
    if world_size % shards:
        raise UserError(f"shards={shards}: must divide the {world_size} processes; --shards=0 takes all of them")
    return shards


def recompute(block: torch.nn.Module) -> None:
    """Makes a block keep its input alone in a training step, and compute the rest again on the way back."""
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def share_out(model: GPT, config, processes, compiled: bool) -> torch.nn.Module:
    """Moves the model to the device and returns what a training step calls: the model itself, compiled, or DDP's.

    fsdp replaces the model's parameters by their shards. The model has its weights by then, so that the draws, which
    depend on a parameter's name, are those of one process. A block goes to the device alone and leaves its shard there.
    """
    sharded = is_sharded(config, processes.world_size)
    by_block = config.activation_checkpointing or sharded
    for angles in [module for module in model.modules() if compiled and isinstance(module, Angles)]:
        # no graph makes them, and a config may name any block_size
        angles.make(min(config.block_size, 65_536), torch.float32, torch.device(processes.device))
    if compiled and by_block:
        # one function for all blocks, and torch.compile leaves a function as it is after 8 graphs: a mixer that reads
        # the number of its layer, as Softmax does, takes one a layer, and another without gradients
        limit, compiler = 8 * len(model.blocks), torch._dynamo.config
        compiler.recompile_limit = max(limit, compiler.recompile_limit)
        compiler.accumulated_recompile_limit = max(limit, compiler.accumulated_recompile_limit)
    for block in model.blocks if by_block else ():
        # of a block, its forward alone: FSDP's hooks, which gather the weights, come before it and are not compiled
        if compiled:
            block.forward = torch.compile(block.forward)
        if config.activation_checkpointing:
            recompute(block)
    if sharded:
        # imported here, and known below by its attributes: one process need not wait half a second for it
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shards = shards_of(config, processes.world_size)
        replicas = processes.world_size // shards
        sizes, names = ((shards,), ("shards",)) if replicas == 1 else ((replicas, shards), ("replicas", "shards"))
        mesh = init_device_mesh(processes.device_type, sizes, mesh_dim_names=names)
        # no MixedPrecisionPolicy: it would round A_log and dt_bias; autocast rounds what goes into products alone
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        return model
    model.to(processes.device)
    step_model: Any = torch.compile(model) if compiled and not by_block else model
    return DistributedDataParallel(step_model) if processes.world_size > 1 else step_model


def no_sync(model: Any, unless: bool) -> contextlib.AbstractContextManager:
    """Inside, the gradients of a backward pass stay in this process, `unless` it is the last one of the step."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP's
        model.set_requires_gradient_sync(unless)
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not unless else contextlib.nullcontext()


@torch.no_grad()
def unsharded(model: GPT) -> GPT:
    """The model; of one whose blocks are sharded, compiled or computed again a plain GPT, with all its weights as they
    are now. Without shards they are the model's own parameters: no copy, and gradients go to the model."""
    if not hasattr(model, "unshard") and not any("forward" in vars(block) for block in model.blocks):  # FSDP's; ours
        return model
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # a GPT draws its seed
        plain = GPT(model.config)
    plain.load_state_dict({name: full_tensor(p) for name, p in model.state_dict(keep_vars=True).items()}, assign=True)
    for name, buffer in model.named_buffers():  # a checkpoint need not have them all
        module, _, attribute = name.rpartition(".")
        setattr(plain.get_submodule(module), attribute, buffer)
    for block, original in zip(plain.blocks, model.blocks, strict=True):
        if isinstance(original.forward, functools.partial):
            recompute(block)
    return plain.train(model.training)


def full_tensor(tensor: Any) -> torch.Tensor:
    """A tensor that may be spread over the processes, such as the norm of sharded gradients, whole on each of them."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def gathered(tree: Any, is_main: bool) -> Any:
    """A dict of dicts with whole tensors, on the CPU, in place of the sharded ones; on ranks other than 0 with None."""
    if isinstance(tree, dict):
        whole = copy.copy(tree)  # a state_dict is more than a dict
        whole.update({name: gathered(value, is_main) for name, value in tree.items()})
        return whole
    if not hasattr(tree, "full_tensor"):
        return tree
    tensor = full_tensor(tree)  # every process takes part
    return tensor.cpu() if is_main else None


def part_of(parameter: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Of a whole tensor of the parameter's shape, what goes with the parameter: all, or this process's shard."""
    if not hasattr(parameter, "full_tensor"):
        return tensor.contiguous()
    from torch.distributed.tensor import distribute_tensor

    # every process has read the same file: nothing has to be sent
    where = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor.to(parameter.device), *where, src_data_rank=None)
