"""How several processes share a run: under ddp each holds the whole model, under fsdp a shard of it
(FSDP2).

    step_model = share_out(model, config, processes, compiled, dtype)   # before the optimizers are made
    with sync_gradients(step_model, is_last): ...                       # a backward pass inside
    norm = clip_gradients(model, config.grad_clip)
    with eager(model): ...                                              # evaluations and meters
    weights, moments = whole_state(model, optimizers)                   # called by every process
    load_moments(model, optimizers, moments)

In one process nothing is shared out, whatever the keys: train.py has one way for all kinds. Only
this file knows that a tensor of an FSDP model is a DTensor. Such a model holds, whole, the block
whose turn it is and what is no block's (the embedding, the last norm), in evaluations and meters,
too. No process ever holds all of it, but for the first one, in RAM, when it saves.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from base.configurator import UserError
from model import GPT
from ops.layers import Angles
from runs.hardware import DTYPES, Processes

LONGEST_ROPE_TABLE = 65_536  # a config may name any block_size


def is_fsdp(config, world_size: int) -> bool:
    """Whether each process holds a shard of the model."""
    return world_size > 1 and config.parallel == "fsdp"


def check_micro_steps(config, world_size: int) -> None:
    """UserError unless all processes have the same number of micro-steps."""
    steps = config.gradient_accumulation_steps
    if steps % world_size:
        raise UserError(
            f"gradient_accumulation_steps={steps}: must be a multiple of the {world_size} processes "
            f"that share the micro-steps; the next one is {steps + -steps % world_size}"
        )


def share_out(
    model: GPT, config, processes: Processes, compiled: bool, dtype: str
) -> torch.nn.Module:
    """Moves the model to the device and returns what a training step calls: the model itself,
    compiled, or DDP's. dtype: of matrix products. Raises UserError."""
    if config.activation_checkpointing and config.dropout and processes.device_type == "mps":
        raise UserError(
            "activation_checkpointing=True: torch draws another dropout on the way back on "
            "device='mps'"
        )
    in_shards = is_fsdp(config, processes.world_size)
    by_block = config.activation_checkpointing or in_shards
    if compiled:  # compiled code cannot build the tables of RoPE
        length = min(config.block_size, LONGEST_ROPE_TABLE)
        for module in model.modules():
            if isinstance(module, Angles):
                module.make(length, torch.float32, torch.device(processes.device))
    for block in model.blocks:
        if block.mlp is not None and block.mlp.n_idle:
            block.mlp.register_forward_hook(with_every_parameter)
    if by_block:
        change_blocks(model, compiled, config.activation_checkpointing)
    if in_shards:
        shard(model, processes, dtype)
        return model
    # the weights of a run that goes on lie in its ckpt.pt, which a save replaces
    for parameter in model.parameters():
        parameter.data = parameter.data.to(processes.device, copy=True)
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


def change_blocks(model: GPT, compiled: bool, activation_checkpointing: bool) -> None:
    """Compiles the forward of each block by itself, since FSDP's hooks, which gather its weights
    before it, are not compiled. With activation_checkpointing a block keeps its input alone, and
    computes the rest again on the way back."""
    if compiled:
        # one function for all blocks, and torch.compile leaves a function as it is after 8 graphs:
        # a mixer that reads the number of its layer, as Softmax does, takes one a layer, and
        # another without gradients
        limit = 8 * len(model.blocks)
        compiler = torch._dynamo.config
        compiler.recompile_limit = max(limit, compiler.recompile_limit)
        compiler.accumulated_recompile_limit = max(limit, compiler.accumulated_recompile_limit)
    for block in model.blocks:
        if compiled:
            block.forward = torch.compile(block.forward)
        if activation_checkpointing:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def shard(model: GPT, processes: Processes, dtype: str) -> None:
    """Replaces the model's parameters by this process's shards. The model has its weights by then,
    so that the draws, which depend on a parameter's name, are those of one process. A block goes to
    the device alone and leaves its shard there.

    dtype: autocast's, in which linear layers of blocks are gathered. Autocast would round a float32
    weight to the same numbers, and hold that copy until the way back. All else (norms, A_log,
    dt_bias, convolutions) is gathered, and all gradients are summed, in float32.
    """
    # imported here, since one process need not wait half a second for it
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(processes.device_type, (processes.world_size,))
    policy = MixedPrecisionPolicy()
    of_blocks = set(model.blocks.parameters())
    # a block has one dtype: what must not be rounded is gathered with what is no block's
    if dtype != "float32":
        policy = MixedPrecisionPolicy(DTYPES[dtype], torch.float32, cast_forward_inputs=False)
        linears = [
            module for module in model.blocks.modules() if isinstance(module, torch.nn.Linear)
        ]
        of_blocks = set(torch.nn.ModuleList(linears).parameters())
    fully_shard(model, mesh=mesh, ignored_params=of_blocks)
    for block in model.blocks:
        others = set(block.parameters()) - of_blocks
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=others)


def is_sharded(model: Any) -> bool:
    return hasattr(model, "reshard")  # FSDP's, whose class only a process that shards has imported


def sync_gradients(model: Any, is_last: bool) -> contextlib.AbstractContextManager:
    """Inside, the gradients of a backward pass stay in this process, until the last one of the
    step, which sums them over the processes."""
    if is_sharded(model):
        model.set_requires_gradient_sync(is_last)
    elif isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return contextlib.nullcontext()


@contextlib.contextmanager
def eager(model: Any) -> Iterator[None]:
    """Inside, hooks on the model's modules are called, as torch.compile does not promise for those
    in a block. An FSDP model may be called by its `features`, too, and every process must make the
    same calls."""
    changed = any("forward" in vars(block) for block in model.blocks)  # by change_blocks
    if is_sharded(model):
        from torch.distributed.fsdp import register_fsdp_forward_method

        # not in training: what is no block's would arrive twice
        register_fsdp_forward_method(model, "features")
    try:
        with torch.compiler.set_stance("force_eager") if changed else contextlib.nullcontext():
            yield
    finally:
        if is_sharded(model):
            del model.features
            model.reshard()  # what is no block's, which stays whole after a pass


# -- Tensors that may be spread over the processes -------------------------------------------------


def whole(tensor: Any) -> torch.Tensor:
    """The tensor, whole on each process; every process has to make the call."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def on_whole(function: Callable, tensor: Any) -> torch.Tensor:
    """function(tensor), which has the tensor's shape. Where the tensor is spread, every process
    computes it from the whole one, and keeps its shard of it."""
    result = function(whole(tensor))
    if not hasattr(tensor, "full_tensor"):
        return result
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: all have the same result, and nothing has to be sent
    return distribute_tensor(result, tensor.device_mesh, tensor.placements, src_data_rank=None)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether every entry is. Every process has to ask, and all get the same answer."""
    return bool(whole(tensor.isfinite().all()))


def clip_gradients(model: torch.nn.Module, most: float | None) -> torch.Tensor:
    """Scales the gradients down to this norm if theirs is larger (None, 0: never). Returns the norm
    that they had."""
    return whole(torch.nn.utils.clip_grad_norm_(model.parameters(), most or math.inf))


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple]:
    """[(name, parameter)], in the order that its state_dict numbers them."""
    pairs = []
    for group in optimizer.param_groups:
        if "param_names" not in group:
            raise UserError(
                "make_optimizers: checkpoints need the names of the parameters; make the optimizer of "
                "model.parameter_groups(...) or of model.named_parameters()"
            )
        pairs += zip(group["param_names"], group["params"], strict=True)
    return pairs


def whole_state(model: GPT, optimizers: list[torch.optim.Optimizer]) -> tuple[dict, dict]:
    """({name: weight}, {name of a parameter: its moments}), whole. Those of an FSDP model are on
    the CPU of the first process; the others get empty dicts."""
    moments: Any = {}
    for optimizer in optimizers:
        for name, parameter in named_parameters(optimizer):
            moments[name] = optimizer.state.get(parameter, {})
    if not is_sharded(model):
        return dict(model.state_dict()), moments
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = state_dict.get_model_state_dict(model, options=options)
    if any(moments.values()):  # before the first step torch would make some by a step of its own
        moments = state_dict.get_optimizer_state_dict(model, optimizers, options=options)
        moments = moments.get("state", {})
    return weights, moments


def load_moments(model: GPT, optimizers: list[torch.optim.Optimizer], moments: dict) -> None:
    """Gives the optimizers copies of the moments of whole_state, which fit. Of an FSDP model each
    process copies its shard. Rates, betas and weight decay stay those of the optimizers."""
    if is_sharded(model):
        from torch.distributed.checkpoint import state_dict

        state: Any = {"state": moments, "param_groups": []}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                state["param_groups"].append(group | {"params": group["param_names"]})
        if any(moments.values()):
            options = state_dict.StateDictOptions(full_state_dict=True)
            state_dict.set_optimizer_state_dict(model, optimizers, state, options=options)
        return
    for optimizer in optimizers:
        copies: Any = {}
        for number, (name, parameter) in enumerate(named_parameters(optimizer)):
            copies[number] = {}
            for part, moment in moments[name].items():
                device = parameter.device if moment.dim() else "cpu"
                copies[number][part] = moment.to(device, copy=True)
        optimizer.load_state_dict(optimizer.state_dict() | {"state": copies})
