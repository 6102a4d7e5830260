"""Where the documents of packed rows begin, as mixers read it: made once for each pass of the model.

    document = Documents(places)        # of the loader: (B, T)
    q = rotate(q, 0, angles, document)  # positions begin anew
    for one in document.split(x): ...   # (documents of one length, length, ...) each

The loader's (B, T) has, for each token, the place in the row at which its document begins: 0 0 0 3 3
is a document of three tokens and one of two.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class Documents:
    """
    first (B, T): whether a token is the first of its document
    position (B, T): how many tokens of its document are before it
    lengths: those of all documents, row by row
    """

    def __init__(self, places: Tensor):
        t = torch.arange(places.shape[1], device=places.device)
        self.first = places == t
        self.position = t - places
        begins = self.first.flatten().nonzero()[:, 0]
        self._bounds = F.pad(begins, (0, 1), value=places.numel())
        self.lengths: list[int] = self._bounds.diff().tolist()
        self._of_length: dict[int, list[int]] = {}  # {length: which documents have it}
        for i, length in enumerate(self.lengths):
            self._of_length.setdefault(length, []).append(i)
        self._crossings: dict[int, tuple] = {}

    def first_steps(self, n: int) -> Tensor:
        """`first` where a token is n steps of the recurrence: (B, n T)."""
        return F.pad(self.first[:, :, None], (0, n - 1)).flatten(1)

    def bounds(self, n: int) -> Tensor:
        """Where the documents begin in all rows end to end, then the length of these: int32, as
        kernels want it. n: steps of the recurrence per token."""
        return (n * self._bounds).int()

    def spans(self) -> list[tuple[int, int, int]]:
        """(row, begin, end) of each document."""
        T = self.first.shape[1]
        spans = []
        place = 0  # in all rows end to end
        for length in self.lengths:
            row, begin = divmod(place, T)
            spans.append((row, begin, begin + length))
            place += length
        return spans

    def split(self, x: Tensor) -> list[Tensor]:
        """(B, n T, ...) -> for each length (documents, n length, ...), as rows of their own. Most
        documents of a text are cut to the same length, and are then read in one call."""
        n = x.shape[1] // self.first.shape[1]
        parts = x.flatten(0, 1).split([n * length for length in self.lengths])
        stacks = []
        for group in self._of_length.values():
            stacks.append(torch.stack([parts[i] for i in group]))
        return stacks

    def join(self, stacks: list[Tensor]) -> Tensor:
        """The reverse of split."""
        parts: dict[int, Tensor] = {}
        for group, stack in zip(self._of_length.values(), stacks, strict=True):
            parts.update(zip(group, stack, strict=True))
        x = torch.cat([parts[i] for i in range(len(parts))])
        return x.view(*self.first.shape, *x.shape[1:])

    def crossing(self, distance: int) -> tuple[Tensor, ...]:
        """(rows, places) of the tokens that have fewer than `distance` tokens of their document before
        them."""
        if distance not in self._crossings:
            self._crossings[distance] = (self.position < distance).nonzero(as_tuple=True)
        return self._crossings[distance]
