"""Notes what the mixers and gates of a model compute as it runs, so that meters need not compute
anything again.

    with recording([block.mixer for block in model.blocks], all_gates(model)) as seen:
        model(idx)
    seen.projection, seen.calls        what the last mixer's `read` got, and every call of a gate

Whatever an edit changes (what a gate is fed, where it stands, what a layer takes from another), the
notes are of the pass itself. `probe` in probe.py looks at them behind every layer.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from gate import Gate
from mixer import Mixer, Projection


class GateCall(NamedTuple):
    """One call of a gate: output = act(y, g)."""

    gate: Gate
    y: torch.Tensor  # (B, T, heads, width)
    g: torch.Tensor  # (B, T, heads or 1, width or 1)
    output: torch.Tensor  # (B, T, heads, width)

    def value(self) -> torch.Tensor:
        """The factor on y, or what was added to it, of g's shape."""
        return self.gate.value(self.g)


@dataclass
class Seen:
    """What one layer computed in a pass. Those of the mixer's tensors are None where its class has
    a `forward` of its own that does not come by there."""

    mixer: Mixer | None = None
    x: torch.Tensor | None = None  # (B, T, C), the input of the mixer
    y: torch.Tensor | None = None  # (B, T, C), its output; behind `probe` what the block adds
    projection: Projection | None = None  # what the mixer's `read` got
    o: torch.Tensor | None = None  # what it returned
    readout: torch.Tensor | None = None  # (B, T, H D), what out_proj got
    calls: list[GateCall] = field(default_factory=list)  # of all gates, in their order
    names: dict[nn.Module, str] = field(default_factory=dict)  # of the gates
    stream: torch.Tensor | None = None  # (B, T, C), the input of the block
    residual: torch.Tensor | None = None  # (B, T, C), its output
    # (B, T, 1 or C): |scale * part| is what a part of the mixer's output adds, over |stream|
    scale: torch.Tensor | None = None

    @property
    def has_weights(self) -> bool:
        """Whether the weight of each value in each readout is known."""
        return (
            self.mixer.explicit_weights is not None
            and self.projection is not None
            and self.readout is not None
        )

    @property
    def gates(self) -> dict[str, list[GateCall]]:
        """{name: the calls of a gate}"""
        gates: dict = {}
        for call in self.calls:
            gates.setdefault(self.names[call.gate], []).append(call)
        return gates

    def last_call(self, name: str) -> GateCall | None:
        """Of the gate of this name, if there is one."""
        calls = self.gates.get(name)
        return calls[-1] if calls else None


def some_rows(value: Any, rows: slice) -> Any:
    """A Seen, or a part of one, of these rows of the batch alone."""
    if isinstance(value, torch.Tensor):
        return value[rows] if len(value) > 1 else value
    if isinstance(value, Seen):
        return Seen(**{name: some_rows(part, rows) for name, part in vars(value).items()})
    if isinstance(value, list):
        return [some_rows(part, rows) for part in value]
    if isinstance(value, tuple):  # a Projection, a GateCall
        return type(value)(*(some_rows(part, rows) for part in value))
    return value


def all_gates(model: nn.Module) -> list[Gate]:
    """Every gate, wherever it is in the model, each once."""
    return [module for module in model.modules() if isinstance(module, Gate)]


def names_of_gates(model: nn.Module, block: nn.Module) -> dict[nn.Module, str]:
    """{gate: its name in a layer}: the position of a gate of the mixer, the path in the block of
    another, the path in the model of one that is in no layer."""
    names = {module: path for path, module in model.named_modules()}
    for path, module in block.named_modules():
        names[module] = path.removeprefix("mixer.gates.")
    return names


@contextlib.contextmanager
def replaced(module: nn.Module, name: str, wrapper: Callable) -> Iterator[None]:
    """Inside, module.name(...) is wrapper(the method that it was, ...)."""
    own = vars(module).get(name)
    setattr(module, name, functools.partial(wrapper, getattr(module, name)))
    try:
        yield
    finally:
        delattr(module, name)
        if own is not None:  # what another one put there
            setattr(module, name, own)


@contextlib.contextmanager
def recording(mixers: Iterable[Mixer], gates: Iterable[Gate]) -> Iterator[Seen]:
    """Inside, the Seen gets what the mixers and gates compute. Afterwards none of them has a trace
    of it."""
    seen = Seen()

    def of_mixer(mixer, args, output):
        seen.mixer = mixer
        seen.x = args[0]
        seen.y = output

    def of_out_proj(out_proj, args):
        seen.readout = args[0]

    def of_read(read, projection, *args, **keys):
        o = read(projection, *args, **keys)
        seen.projection = projection
        seen.o = o
        return o

    def of_gate(gate, act, y, g):
        output = act(y, g)
        if g.dim() == 2:  # a static gate has no B and T
            g = g.expand(*y.shape[:2], -1, -1)
        seen.calls.append(GateCall(gate, y, g, output))
        return output

    with contextlib.ExitStack() as stack:
        for mixer in mixers:
            stack.enter_context(mixer.register_forward_hook(of_mixer))
            stack.enter_context(mixer.out_proj.register_forward_pre_hook(of_out_proj))
            stack.enter_context(replaced(mixer, "read", of_read))
        for gate in gates:
            stack.enter_context(replaced(gate, "act", functools.partial(of_gate, gate)))
        yield seen
