"""What several test files do with small models. It imports torch alone, since test_fla.py needs it so."""

import torch

from model import GPT
from runs.recorder import Seen, all_gates, names_of_gates, recording


@torch.no_grad()
def off_its_start(config, dtype=torch.float64, noise=0.1):
    """A model with noise on every weight, in evaluation: gates that begin at zero would hide mistakes."""
    torch.manual_seed(0)
    model = GPT(config).to(dtype).eval()
    for p in model.parameters():
        p.add_(torch.randn_like(p) * noise)
    return model


@torch.no_grad()
def logits_of_pieces(model, idx, lengths):
    """The logits of idx, read in pieces of these lengths with the state kept."""
    state, start, parts = model.init_state(len(idx), dtype=model.wte.weight.dtype), 0, []
    for length in lengths:
        x, state = model.features(idx[:, start : start + length], state, start)
        parts, start = [*parts, model.logits(x)], start + length
    return torch.cat(parts, dim=1)


@torch.no_grad()
def seen_of(mixer, x, stream=None):
    """What the meters see of a mixer that runs alone on x (B, T, C), in a block whose input is stream (None: x)."""
    with recording([mixer], all_gates(mixer)) as notes:
        y = mixer(x)
    names = {gate: path.removeprefix("gates.") for gate, path in names_of_gates(mixer, mixer).items()}
    gates: dict = {name: [call for call in notes.calls if call.gate is gate] for gate, name in names.items()}
    stream = x if stream is None else stream
    scale = 1 / stream.norm(dim=-1, keepdim=True)
    return Seen(mixer, x, y, notes.projection, notes.o, notes.readout, gates, stream, stream + y, scale)
