"""What is known of a GPU without one: no wait in a step, no float64, its FLOPs."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import train
from model import GPT, MIXERS, GPTConfig
from runs import checkpoint as checkpoints
from runs import parallel

SMALL = dict(n_layer=1, n_head=2, n_embd=32, block_size=140, vocab_size=64, state_size=8)


@contextlib.contextmanager
def without_values():
    """Tensors have a shape and no data there, and code that asks takes the device for a GPU.

    The device meta has no autocast: torch raises an error there even for switching it off, or asking for it.
    """
    import torch._dynamo  # noqa: F401 - it keeps the functions that it finds when it is first imported

    with (
        torch.device("meta"),
        mock.patch.object(torch, "autocast", lambda *args, **keys: contextlib.nullcontext()),
        mock.patch.object(torch, "is_autocast_enabled", lambda *args: False),
    ):
        yield


class OnTheDevice(TorchDispatchMode):
    """Raises where a tensor comes to be on the host, whose copy may wait, or in float64, which MPS lacks."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            assert not isinstance(x, torch.Tensor) or (x.is_meta and x.dtype != torch.float64), function
        return result


def train_and_decode(B, T, **keys):
    """One step and one decoded token. Returns the FLOPs of the step: (as torch counts them, as the model declares)."""
    with without_values():
        model = GPT(GPTConfig(**keys)).to(torch.bfloat16)
        idx = torch.zeros(B, T, dtype=torch.long)
        model(idx)  # the first one makes the angles
        with OnTheDevice():
            with FlopCounterMode(display=False) as counter:
                model(idx, idx).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with torch.no_grad():
                x, _ = model.features(idx[:, :1], model.init_state(B, device="meta", dtype=torch.bfloat16), T)
                model.logits(x[:, -1]).argmax(-1)
        return counter.get_total_flops(), 3 * model.flops_per_token(T) * B * T


@pytest.mark.parametrize("name", MIXERS)
def test_a_training_step_and_a_decoded_token_never_make_the_host_wait_and_need_no_float64(name):
    gate = "native" if MIXERS[name].native_gate else "elementwise"
    T = (MIXERS[name].longest or 140) - 10
    counted, _ = train_and_decode(2, T, **SMALL | dict(block_size=T + 10), attention=name, gate=gate)
    assert counted > 0


def test_the_products_of_a_step_are_the_flops_that_the_model_declares():
    counted, declared = train_and_decode(4, 64, n_layer=2, n_head=4, n_embd=256, vocab_size=512, block_size=65)
    # it declares a causal half of softmax attention, of which the count has the whole, and a chunk of the logits twice
    assert declared < counted < 1.1 * declared


def test_the_angles_are_in_one_float32_table_that_a_compiled_step_reads_and_no_checkpoint_holds():
    config = train.TrainConfig(**SMALL | dict(attention="softmax,cosformer,softmax", n_layer=3, block_size=10**12))
    model, idx = GPT(config), torch.zeros(1, 20, dtype=torch.long)
    parallel.share_out(model, config, SimpleNamespace(device="cpu", world_size=1), compiled=True, dtype="float32")
    angles = [block.mixer.angles for block in model.blocks]
    assert [tuple(each.table.shape) for each in angles[:2]] == [(2, 65_536, 1, 8), (2, 65_536, 1, 1)]
    assert angles[2] is angles[0]
    assert not any("table" in name for name in model.state_dict())
    explained = torch._dynamo.explain(model)(idx, idx)
    torch._dynamo.reset()
    (graph,) = explained.graphs
    assert not any("cos" in str(node.target) for node in graph.graph.nodes)
    model.to(torch.bfloat16)(idx)
    assert {each.table.dtype for each in angles} == {torch.float32}
    checkpoints.build_model(config, model.state_dict(), "memory")(idx)  # made without a table


@pytest.mark.parametrize("name", ["softmax", "gla", "gated_deltanet"])
def test_a_compiler_sees_into_every_norm_and_rotation_and_can_fuse_it_with_what_is_beside_it(name):
    """Both ways a step is operators of torch, and one of ours, the loss: none of the backwards written by hand is
    closed to it."""
    targets = set()

    def seeing(graph, inputs):
        targets.update(str(node.target).split(".")[0] for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=seeing, decompositions=core_aten_decompositions())
    model, idx = GPT(GPTConfig(**SMALL | dict(block_size=64), attention=name)), torch.zeros(1, 64, dtype=torch.long)
    model(idx)  # the first one makes the angles
    torch.compile(model, backend=backend)(idx, idx).backward()
    assert targets - {"<built-in function getitem>", "aten", "prims"} == {"nanogate"}
