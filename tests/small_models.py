"""What several test files do with small models. It imports torch alone, since test_fla.py needs it so."""

import torch

from model import GPT


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
