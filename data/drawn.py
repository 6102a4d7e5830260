"""
Rows that are drawn anew for every step, so that a training run never reads one twice: the tasks of
data/states, data/induction and data/regression.

    tokens, labels = rows("parity", 32, "a key", 1000, 256)       # rows 1000, ..., 1255 of this key: both (256, 32)

Row i of a key is a pure function of (task, length, key, i): however a run is dealt out, stopped and
resumed, its rows are the same. Philox draws four numbers of 64 bits from (key, counter) alone.
Where a row needs n counters, row i has i * n, ..., (i + 1) * n - 1, so that it is found without the
rows before it. Ids of tokens and states begin at 1, and the label 0 means that nothing is
predicted. No torch is imported here.
"""

import functools
import hashlib
import itertools

import numpy as np

VERSION = 1  # raise it when the same key no longer gives the same rows
LONGEST = 1 << 20  # tokens of a row


def rows(task: str, length: int, key: str, first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, labels), each (n, length) int64: the rows first, ..., first + n - 1 of the key."""
    return TASKS[task][0](random_bits(task, length, key, first, n))


def random_bits(task: str, length: int, key: str, first: int, n: int) -> np.ndarray:
    """(n, length): the 32 random bits of each token of these rows."""
    counters = -(-length // 4)  # of a row: length / 4, rounded up
    digest = hashlib.sha256(f"{task} {length} {key}".encode()).digest()
    seed = int.from_bytes(digest[:16], "little")
    philox = np.random.Philox(key=seed, counter=first * counters)
    bits = philox.random_raw(4 * counters * n) >> np.uint64(32)
    return bits.reshape(n, 4 * counters)[:, :length]


def below(bits: np.ndarray, k: int) -> np.ndarray:
    """Integers of 32 random bits -> 0, ..., k - 1, all as likely (to within k / 2^32)."""
    return (bits * np.uint64(k) >> np.uint64(32)).astype(np.int64)


def cumulated(table: np.ndarray) -> np.ndarray:
    """A table of probabilities (K, K) as one sorted array (K K,): each row is cumulated, and row i
    lies between i and i + 1. One search in it draws from any row."""
    sums = np.minimum(np.cumsum(table, axis=1), 1.0)
    return (sums + np.arange(len(table))[:, None]).ravel()


def draw_next(sums: np.ndarray, ids: np.ndarray, chances: np.ndarray, k: int) -> np.ndarray:
    """Draws the id that follows each of these ids (n,). sums: the table, as `cumulated` gives it.
    chances: numbers in 0 ... 1."""
    drawn = np.searchsorted(sums, ids + chances, side="right") - ids * k
    return np.minimum(drawn, k - 1)  # a sum of floats may round up to the next row


def parity(bits):
    """Bits 0 and 1 as the ids 1 and 2; the state is the sum of those so far, modulo 2."""
    tokens = below(bits, 2)
    return 1 + tokens, 1 + tokens.cumsum(1) % 2


def arithmetic(bits):
    """Digits at even positions and operators between them; the state, at digits, is the value so
    far, modulo 5."""
    digits = below(bits[:, ::2], 5)
    operators = below(bits[:, 1::2], 3)
    tokens = np.zeros(bits.shape, np.int64)
    tokens[:, ::2] = 1 + digits
    tokens[:, 1::2] = 6 + operators
    labels = np.zeros(bits.shape, np.int64)
    total = np.zeros_like(digits[:, 0])  # of the terms that have ended
    term = digits[:, 0]  # the value of the last term so far
    for i, digit in enumerate(digits.T):
        if i > 0:
            operator = operators[:, i - 1]
            total = np.where(operator == 2, total, total + term)
            term = np.choose(operator, [digit, -digit, term * digit % 5])
        labels[:, 2 * i] = 1 + (total + term) % 5
    return tokens, labels


def word_problem(size):
    """The function that draws words of the symmetric group: ids are its elements, permutations in
    alphabetic order; the state is the product so far, which applies the last element first, (g
    h)(i) = g(h(i))."""
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


INDUCTION_IDS = 64
SHORTEST_STRING = 12  # tokens; the longest has 15 more


@functools.cache
def bigram_table() -> np.ndarray:
    """(64, 64): the probabilities of the next id behind each id, the same for all rows. The entropy
    behind an id is 3.5 nats on average; log 64 is 4.2."""
    n = INDUCTION_IDS
    bits = np.random.Philox(key=0).random_raw(n * n) >> np.uint64(32)
    weights = (bits.reshape(n, n) / 2.0**32) ** 3
    return weights / weights.sum(1, keepdims=True)


def sources_of(bits: np.ndarray) -> np.ndarray:
    """(n, T): for each position of a row the one that it repeats, or itself where its token is new.

    A row is a sequence of strings. The first is new. Each later one is new in one case of four, and
    else repeats one of the new strings before it, from its first token on; the last one is cut
    where the row ends. The low 12 bits of position i decide about the i-th string: it is new if
    bits 0 and 1 are zero, bits 4 to 7 choose the string that it repeats, and bits 8 to 11 are added
    to the shortest length.
    """
    n, T = bits.shape
    sources = np.tile(np.arange(T), (n, 1))
    low = (bits & np.uint64(0xFFF)).astype(np.int64)
    for row in range(n):
        new_strings = []  # (first position, length)
        start = 0
        for choice in low[row].tolist():
            if start >= T:
                break
            if new_strings and choice & 3:
                first, length = new_strings[(choice >> 4 & 15) * len(new_strings) // 16]
                length = min(length, T - start)
                sources[row, start : start + length] = np.arange(first, first + length)
            else:
                length = SHORTEST_STRING + (choice >> 8)
                new_strings.append((start, length))
            start += length
    return sources


def induction(bits):
    """Strings of a chain with a fixed table of pairs, and repeats of them. Labels are the next
    tokens, 0 at the end."""
    sums = cumulated(bigram_table())
    # the upper 20 of 32 bits; the lower 12 are those of sources_of
    chances = (bits >> np.uint64(12)) / 2.0**20
    sources = sources_of(bits)
    rows = np.arange(len(bits))
    tokens = np.zeros(bits.shape, np.int64)
    tokens[:, 0] = below(bits[:, 0], INDUCTION_IDS)
    for t in range(1, bits.shape[1]):
        new = draw_next(sums, tokens[:, t - 1], chances[:, t], INDUCTION_IDS)
        is_repeat = sources[:, t] < t
        tokens[:, t] = np.where(is_repeat, tokens[rows, sources[:, t]], new)
    labels = np.zeros_like(tokens)
    labels[:, :-1] = 1 + tokens[:, 1:]
    return 1 + tokens, labels


X_LEVELS = 8  # x1 and x2 are 1, ..., 8
WEIGHTS = 5  # each weight is one of -2, ..., 2
LARGEST_Y = 2 * X_LEVELS * (WEIGHTS // 2)  # y is one of -32, ..., 32
REGRESSION_IDS = 1 + 2 * X_LEVELS + 2 * LARGEST_Y + 1  # with 0; those of x1, then of x2, then of y


def regression(bits):
    """Rows x1 x2 y x1 x2 y ... where y = w1 x1 + w2 x2, with weights of its own for each row. The
    label of an x2 is the y behind it. The bits of a row's first y choose the two weights."""
    T = bits.shape[1]
    bits = np.pad(bits, ((0, 0), (0, -T % 3)))  # to whole examples
    x1 = 1 + below(bits[:, 0::3], X_LEVELS)  # (n, examples)
    x2 = 1 + below(bits[:, 1::3], X_LEVELS)
    pair = below(bits[:, 2:3], WEIGHTS**2)  # (n, 1)
    w1 = pair // WEIGHTS - WEIGHTS // 2
    w2 = pair % WEIGHTS - WEIGHTS // 2
    tokens = np.zeros(bits.shape, np.int64)
    tokens[:, 0::3] = x1
    tokens[:, 1::3] = X_LEVELS + x2
    tokens[:, 2::3] = 1 + 2 * X_LEVELS + LARGEST_Y + w1 * x1 + w2 * x2
    labels = np.zeros_like(tokens)
    labels[:, 1::3] = tokens[:, 2::3]
    return tokens[:, :T], labels[:, :T]


# name: (32 random bits a token (n, T) -> tokens, labels; the number of states; that of ids, with 0)
TASKS = {
    "parity": (parity, 2, 3),
    "arithmetic": (arithmetic, 5, 9),
    "s3": (word_problem(3), 6, 7),
    "s5": (word_problem(5), 120, 121),
    "induction": (induction, INDUCTION_IDS, INDUCTION_IDS + 1),
    "regression": (regression, 2 * LARGEST_Y + 1, REGRESSION_IDS),
}
STATES = ("parity", "arithmetic", "s3", "s5")  # those of data/states
