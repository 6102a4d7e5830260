"""How several processes share a run: under ddp each holds the whole model, under fsdp a shard of it
(FSDP2).

    step_model = share_out(model, config, processes, compiled, dtype)   # before an optimizer takes the parameters
    with no_sync(step_model, unless=is_last): ...                       # a backward pass inside
    with readable(model): ...                                           # evaluations and meters
    state = gathered(state, is_main)                                    # every process has to make these calls

In one process nothing is shared out, whatever the keys: the model stays as it is. What these calls
return then is what they were given, and train.py has one way for all kinds. An FSDP model holds,
whole, the block whose turn it is and what is no block's (the embedding, the last norm), in
evaluations and meters, too. No process ever holds all of it.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from configurator import UserError
from model import GPT
from ops.layers import Angles
from runs.hardware import DTYPES, Processes


def is_sharded(config, world_size: int) -> bool:
    return world_size > 1 and config.parallel == "fsdp"


def shards_of(config, world_size: int) -> int:
    """How many processes share one copy of the weights, gradients and moments. Raises UserError."""
    shards = config.shards or world_size if is_sharded(config, world_size) else 1
    if world_size % shards:
        raise UserError(
            f"shards={shards}: must divide the {world_size} processes; --shards=0 takes all of them"
        )
    return shards


def share_out(
    model: GPT, config, processes: Processes, compiled: bool, dtype: str
) -> torch.nn.Module:
    """Moves the model to the device and returns what a training step calls: the model itself,
    compiled, or DDP's.

    dtype: of matrix products, in which fsdp gathers them, too, if gather_dtype does not say
    float32.
    """
    if config.activation_checkpointing and config.dropout and processes.device_type == "mps":
        raise UserError(
            "activation_checkpointing=True: torch draws another dropout on the way back on device='mps'"
        )
    sharded = is_sharded(config, processes.world_size)
    by_block = config.activation_checkpointing or sharded
    for angles in [module for module in model.modules() if compiled and isinstance(module, Angles)]:
        # no graph makes them, and a config may name any block_size
        angles.make(min(config.block_size, 65_536), torch.float32, torch.device(processes.device))
    for block in model.blocks:
        if block.mlp is not None and block.mlp.n_idle:
            block.mlp.register_forward_hook(with_every_parameter)
    if compiled and by_block:
        # one function for all blocks, and torch.compile leaves a function as it is after 8 graphs:
        # a mixer that reads the number of its layer, as Softmax does, takes one a layer, and
        # another without gradients
        limit, compiler = 8 * len(model.blocks), torch._dynamo.config
        compiler.recompile_limit = max(limit, compiler.recompile_limit)
        compiler.accumulated_recompile_limit = max(limit, compiler.accumulated_recompile_limit)
    for block in model.blocks if by_block else ():
        # of a block, its forward alone: FSDP's hooks, which gather the weights, come before it and
        # are not compiled
        if compiled:
            block.forward = torch.compile(block.forward)
        # it keeps its input alone, and computes the rest again on the way back
        if config.activation_checkpointing:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if sharded:
        gather_dtype = dtype if config.gather_dtype == "auto" else config.gather_dtype
        shard(model, processes, shards_of(config, processes.world_size), gather_dtype)
        return model
    # those of a run that goes on lie in its ckpt.pt, which a save replaces
    for p in model.parameters():
        p.data = p.data.to(processes.device, copy=True)
    model.to(processes.device)
    step_model: Any = torch.compile(model) if compiled and not by_block else model
    if processes.world_size == 1:
        return step_model
    # without the views, gradients and their copies in DDP's buckets are both held. No static_graph:
    # torch then fails in a first micro-step without communication, and it spares a search for
    # unused parameters that is off anyway
    step_model = DistributedDataParallel(step_model, gradient_as_bucket_view=True)
    # before every forward pass; its argument of that name is deprecated
    step_model.broadcast_buffers = False
    return step_model


def with_every_parameter(mlp: torch.nn.Module, args: tuple, y: torch.Tensor) -> torch.Tensor:
    """y, of which every parameter of a sparse MLP is now a part, with a factor of zero.

    An expert that got no token then has a gradient of zeros, as if it had been computed and weighed
    with zero. Without one DDP and FSDP would wait for it, or sum other gradients in one process
    than in another.
    """
    return y + 0.0 * sum(p.flatten()[0] for p in mlp.parameters())


def shard(model: GPT, processes: Processes, shards: int, dtype: str) -> None:
    """Replaces the model's parameters by their shards. The model has its weights by then, so that
    the draws, which depend on a parameter's name, are those of one process. A block goes to the
    device alone and leaves its shard there.

    dtype: autocast's, in which linear layers of blocks are gathered. Autocast would round a float32
    weight to the same numbers, and hold that copy until the way back. All else (norms, A_log,
    dt_bias, convolutions) is gathered, and all gradients are summed, in float32.
    """
    # imported here, and known below by its attributes: one process need not wait half a second for
    # it
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    replicas = processes.world_size // shards
    sizes, names = (
        ((shards,), ("shards",)) if replicas == 1 else ((replicas, shards), ("replicas", "shards"))
    )
    mesh = init_device_mesh(processes.device_type, sizes, mesh_dim_names=names)
    policy, of_blocks = MixedPrecisionPolicy(), set(model.blocks.parameters())
    # a block has one dtype: what must not be rounded is gathered with what is no block's
    if dtype != "float32":
        policy = MixedPrecisionPolicy(DTYPES[dtype], torch.float32, cast_forward_inputs=False)
        linears = [
            module for module in model.blocks.modules() if isinstance(module, torch.nn.Linear)
        ]
        of_blocks = {parameter for linear in linears for parameter in linear.parameters()}
    fully_shard(model, mesh=mesh, ignored_params=of_blocks)
    for block in model.blocks:
        fully_shard(
            block, mesh=mesh, mp_policy=policy, ignored_params=set(block.parameters()) - of_blocks
        )


def no_sync(model: Any, unless: bool) -> contextlib.AbstractContextManager:
    """Inside, the gradients of a backward pass stay in this process, `unless` it is the last one of
    the step."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP's
        model.set_requires_gradient_sync(unless)
    return (
        model.no_sync()
        if isinstance(model, DistributedDataParallel) and not unless
        else contextlib.nullcontext()
    )


@contextlib.contextmanager
def readable(model: Any) -> Iterator[None]:
    """Inside, hooks on the model's modules are called, as torch.compile does not promise for those
    in a block. A model in shards may be called by its `features`, too, and every process must make
    the same calls."""
    is_in_shards = hasattr(model, "reshard")  # FSDP's
    if is_in_shards:
        from torch.distributed.fsdp import register_fsdp_forward_method

        # not in training: what is no block's would arrive twice
        register_fsdp_forward_method(model, "features")
    changed = any("forward" in vars(block) for block in model.blocks)  # by share_out
    try:
        with torch.compiler.set_stance("force_eager") if changed else contextlib.nullcontext():
            yield
    finally:
        if is_in_shards:
            del model.features
            model.reshard()  # what is no block's, which stays whole after a pass


def full_tensor(tensor: Any) -> torch.Tensor:
    """A tensor that may be spread over the processes, such as the norm of sharded gradients, whole
    on each of them."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def gathered(tree: Any, is_main: bool) -> Any:
    """A dict of dicts with whole tensors, on the CPU, in place of the sharded ones; on ranks other
    than 0 with None."""
    if isinstance(tree, dict):
        return {name: gathered(value, is_main) for name, value in tree.items()}
    if not hasattr(tree, "full_tensor"):
        return tree
    tensor = full_tensor(tree)  # every process takes part
    return tensor.cpu() if is_main else None


def rows_of(parameter: Any, tensor: Any) -> torch.Tensor:
    """Of a whole tensor of the parameter's shape, a view of what this process holds of the
    parameter: all, or rows."""
    if hasattr(tensor, "full_tensor"):  # a shard already
        return tensor.to_local()
    for dim, placement in enumerate(getattr(parameter, "placements", ())):
        if placement.is_shard() and tensor.ndim:
            mesh = parameter.device_mesh
            # as fully_shard cuts, so that the last ones may have none
            rows = -(-tensor.shape[0] // mesh.size(dim))
            tensor = tensor[rows * mesh.get_local_rank(dim) :][:rows]
    return tensor


def part_of(parameter: Any, tensor: Any) -> torch.Tensor:
    """Of a whole tensor of the parameter's shape, what goes with the parameter: all, or this
    process's shard."""
    if not hasattr(parameter, "full_tensor") or hasattr(tensor, "full_tensor"):
        return tensor.contiguous()
    from torch.distributed.tensor import DTensor

    # every process has the same tensor: nothing has to be sent, and its rows alone go to the device
    rows = rows_of(parameter, tensor).to(parameter.device).contiguous()
    whole = dict(shape=parameter.shape, stride=parameter.stride())
    return DTensor.from_local(
        rows, parameter.device_mesh, parameter.placements, run_check=False, **whole
    )
