"""
Rows that are drawn anew for every step, so that a training run never reads one twice: the tasks of data/states.

    tokens, labels = rows("parity", 32, "a key", 1000, 256)       # rows 1000, ..., 1255 of this key, each (256, 32)

Row i of a key is a pure function of (task, length, key, i): however a run is dealt out, stopped and resumed, its rows
are the same. Philox draws four numbers of 64 bits from (key, counter) alone. Where a row needs n counters, row i has
i * n, ..., (i + 1) * n - 1, so that it is found without the rows before it. Ids of tokens and states begin at 1, and
the label 0 means that nothing is predicted. No torch is imported here.
"""

import hashlib
import itertools

import numpy as np

VERSION = 1  # raise it when the same key no longer gives the same rows
LONGEST = 1 << 20  # tokens of a row


def rows(task: str, length: int, key: str, first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, labels), each (n, length) int64: the rows first, ..., first + n - 1 of the key."""
    counters = -(-length // 4)
    philox_key = int.from_bytes(hashlib.sha256(f"{task} {length} {key}".encode()).digest()[:16], "little")
    bits = np.random.Philox(key=philox_key, counter=first * counters).random_raw(4 * counters * n)
    return TASKS[task][0]((bits >> np.uint64(32)).reshape(n, 4 * counters)[:, :length])


def below(bits: np.ndarray, k: int) -> np.ndarray:
    """Integers of 32 random bits -> 0, ..., k - 1, all as likely (to within k / 2^32)."""
    return (bits * np.uint64(k) >> np.uint64(32)).astype(np.int64)


def parity(bits):
    """Bits 0 and 1 as the ids 1 and 2; the state is the sum of those so far, modulo 2."""
    tokens = below(bits, 2)
    return 1 + tokens, 1 + tokens.cumsum(1) % 2


def arithmetic(bits):
    """Digits at even positions and operators between them; the state, at digits, is the value so far, modulo 5."""
    digits, operators = below(bits[:, ::2], 5), below(bits[:, 1::2], 3)
    tokens, labels = np.zeros((2, *bits.shape), np.int64)
    tokens[:, ::2], tokens[:, 1::2] = 1 + digits, 6 + operators
    total, term = np.zeros_like(digits[:, 0]), digits[:, 0]  # of the terms that have ended, and of the last one
    for i, digit in enumerate(digits.T):
        if i > 0:
            operator = operators[:, i - 1]
            total = np.where(operator == 2, total, total + term)
            term = np.choose(operator, [digit, -digit, term * digit % 5])
        labels[:, 2 * i] = 1 + (total + term) % 5
    return tokens, labels


def word_problem(size):
    """The function that draws words of the symmetric group: ids are its elements, permutations in alphabetic order; the
    state is the product so far, which applies the last element first, (g h)(i) = g(h(i))."""
    elements = np.array(list(itertools.permutations(range(size))))  # (N, size)
    spelled = size ** np.arange(size)[::-1]  # a permutation as a number, which grows with its id
    product = np.searchsorted(elements @ spelled, elements[:, elements] @ spelled)  # (N, N)

    def draw(bits):
        tokens = below(bits, len(elements))
        states = tokens.copy()
        for t in range(1, bits.shape[1]):
            states[:, t] = product[states[:, t - 1], tokens[:, t]]
        return 1 + tokens, 1 + states

    return draw


# name: (32 random bits a token (n, T) -> tokens, labels; the number of states; that of ids, with 0)
TASKS = {
    "parity": (parity, 2, 3),
    "arithmetic": (arithmetic, 5, 9),
    "s3": (word_problem(3), 6, 7),
    "s5": (word_problem(5), 120, 121),
}
