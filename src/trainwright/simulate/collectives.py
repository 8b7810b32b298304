"""Collectives, step by step, on real arrays; and the formula of what each rank sends.

Every algorithm takes `send(i, j, array)`, which carries an array from member i of the group to member j (and counts it), and the members' arrays
in group order. Sums run in the order in which a real ring or tree adds, and every rank ends with the same bits.

Bytes sent by member i of n, where a message of S bytes is cut into chunks c_0 .. c_(n-1) (sizes differ by one element where n does not divide):

    ring reduce-scatter   S - c_i                   = (n-1)/n S where n divides
    ring all-gather       S - c_(i+1)               = (n-1)/n S
    ring all-reduce       2 S - c_i - c_(i+1)       = 2 (n-1)/n S           Patarasuk and Yuan 2009
    tree all-reduce       half of S in each of two mirrored binary trees: once up (not the root), once down to every child   Sanders et al. 2009
    all-to-all            what is addressed to others = (n-1)/n S           pairwise exchange
    broadcast             S to every child of a binomial tree; (n-1) S in all
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import unknown

Array = np.ndarray[Any, Any]
Send = Callable[[int, int, Array], Array]
ALGORITHMS = ("ring", "tree")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


def split_sizes(length: int, parts: int) -> list[int]:
    """`length` items over `parts`, the first ones one larger where it does not divide (as `numpy.array_split`)."""
    small, more = divmod(length, parts)
    return [small + (i < more) for i in range(parts)]


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """(start, end) of each part of `split_sizes`."""
    ends = np.cumsum([0, *split_sizes(length, parts)]).tolist()
    return list(itertools.pairwise(ends))


def reduce_scatter(send: Send, pieces: Sequence[Sequence[Array]]) -> list[Array]:
    """Ring. `pieces[i][c]` is what member i adds to chunk c; member c ends with chunk c summed over all. n - 1 steps."""
    n = len(pieces)
    held = [list(p) for p in pieces]
    for step in range(n - 1):
        moved = [send(i, (i + 1) % n, held[i][(i - step - 1) % n]) for i in range(n)]
        for i in range(n):
            chunk = (i - step - 2) % n
            held[i][chunk] = moved[(i - 1) % n] + held[i][chunk]
    return [held[i][i] for i in range(n)]


def all_gather(send: Send, arrays: Sequence[Array]) -> list[list[Array]]:
    """Ring. Member i brings chunk i; everyone ends with all chunks, in order. n - 1 steps."""
    n = len(arrays)
    held: list[dict[int, Array]] = [{i: a} for i, a in enumerate(arrays)]
    for step in range(n - 1):
        moved = [send(i, (i + 1) % n, held[i][(i - step) % n]) for i in range(n)]
        for i in range(n):
            held[i][(i - 1 - step) % n] = moved[(i - 1) % n]
    return [[h[c] for c in range(n)] for h in held]


def ring_all_reduce(send: Send, arrays: Sequence[Array]) -> list[Array]:
    """Reduce-scatter, then all-gather. 2 (n - 1) steps."""
    n, shape = len(arrays), arrays[0].shape
    chunks = bounds(arrays[0].size, n)
    flat = [a.reshape(-1) for a in arrays]
    summed = reduce_scatter(send, [[f[lo:hi] for lo, hi in chunks] for f in flat])
    return [np.concatenate(got).reshape(shape) for got in all_gather(send, summed)]


def _tree(n: int, mirrored: bool) -> tuple[list[int], dict[int, int]]:
    """Members in heap order (root first) and each one's parent; the mirrored tree makes leaves of the first tree's inner nodes."""
    order = [n - 1 - i for i in range(n)] if mirrored else list(range(n))
    return order, {order[i]: order[(i - 1) // 2] for i in range(1, n)}


def tree_all_reduce(send: Send, arrays: Sequence[Array]) -> list[Array]:
    """Double binary tree: each tree sums half of the array towards its root and hands the sum down. 2 log2(n) steps."""
    n, shape = len(arrays), arrays[0].shape
    halves: list[list[Array]] = []
    for number, (lo, hi) in enumerate(bounds(arrays[0].size, 2)):
        order, parent = _tree(n, mirrored=bool(number))
        held = [a.reshape(-1)[lo:hi] for a in arrays]
        for i in reversed(order[1:]):
            held[parent[i]] = held[parent[i]] + send(i, parent[i], held[i])
        for i in order[1:]:
            held[i] = send(parent[i], i, held[parent[i]])
        halves.append(held)
    return [np.concatenate([first, second]).reshape(shape) for first, second in zip(*halves)]


def all_to_all(send: Send, pieces: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """Pairwise: `pieces[i][j]` goes from member i to member j. n - 1 steps; sizes may differ."""
    n = len(pieces)
    got: list[list[Array]] = [[pieces[i][i] if j == i else pieces[j][i] for j in range(n)] for i in range(n)]
    for step in range(1, n):
        for i in range(n):
            j = (i + step) % n
            got[j][i] = send(i, j, pieces[i][j])
    return got


def _broadcast_edges(n: int) -> list[tuple[int, int]]:
    """(from, to) of a binomial tree over positions relative to the root, in the order in which they run."""
    edges, reach = [], 1
    while reach < n:
        edges += [(i, i + reach) for i in range(reach) if i + reach < n]
        reach *= 2
    return edges


def broadcast(send: Send, array: Array, n: int, root: int) -> list[Array]:
    """Binomial tree from member `root`. ceil(log2 n) steps."""
    held: dict[int, Array] = {0: array}
    for i, j in _broadcast_edges(n):
        held[j] = send((i + root) % n, (j + root) % n, held[i])
    return [held[(i - root) % n] for i in range(n)]


def max_reduce(send: Send, arrays: Sequence[Array]) -> list[Array]:
    """All-reduce with max in place of sum, as a ring all-gather of chunks' maxima: the bytes of a ring all-reduce."""
    n, shape = len(arrays), arrays[0].shape
    chunks = bounds(arrays[0].size, n)
    held = [[a.reshape(-1)[lo:hi] for lo, hi in chunks] for a in arrays]
    for step in range(n - 1):
        moved = [send(i, (i + 1) % n, held[i][(i - step - 1) % n]) for i in range(n)]
        for i in range(n):
            chunk = (i - step - 2) % n
            held[i][chunk] = np.maximum(moved[(i - 1) % n], held[i][chunk])
    return [np.concatenate(got).reshape(shape) for got in all_gather(send, [held[i][i] for i in range(n)])]


# --- the formulas ------------------------------------------------------------------------------------------------------------------------------


def ring_bytes(kind: str, chunk_bytes: Sequence[int], member: int) -> int:
    """Bytes that `member` sends in a ring collective whose message is cut into `chunk_bytes`."""
    n, total = len(chunk_bytes), sum(chunk_bytes)
    if n == 1:
        return 0
    own, following = chunk_bytes[member], chunk_bytes[(member + 1) % n]
    if kind == "reduce_scatter":
        return total - own
    if kind == "all_gather":
        return total - following
    if kind == "all_reduce":
        return 2 * total - own - following
    raise unknown("ring collective", kind, ("reduce_scatter", "all_gather", "all_reduce"))


def tree_bytes(halves: Sequence[int], n: int, member: int) -> int:
    """Bytes that `member` sends in a double-binary-tree all-reduce whose two halves have these sizes."""
    total = 0
    for number, size in enumerate(halves):
        order, parent = _tree(n, mirrored=bool(number))
        children = sum(p == member for p in parent.values())
        total += size * (children + (member != order[0]))
    return total


def broadcast_bytes(size: int, n: int, root: int, member: int) -> int:
    """Bytes that `member` sends in a broadcast of `size` bytes from `root`."""
    return size * sum((i + root) % n == member for i, _ in _broadcast_edges(n))


def expected_bytes(kind: str, elements: int, itemsize: int, n: int, member: int, algorithm: str = "ring", root: int = 0) -> int:
    """Bytes that `member` of `n` sends for a message of `elements` (what all end with; for all-to-all what each starts with)."""
    chunks = [c * itemsize for c in split_sizes(elements, n)]
    if kind == "all_reduce" and algorithm == "tree":
        return tree_bytes([h * itemsize for h in split_sizes(elements, 2)], n, member)
    if kind in ("all_reduce", "all_gather", "reduce_scatter"):
        return ring_bytes(kind, chunks, member)
    if kind == "all_to_all":
        return sum(chunks) - chunks[member]
    if kind == "broadcast":
        return broadcast_bytes(elements * itemsize, n, root, member)
    if kind == "send_recv":
        return elements * itemsize if member == root and n > 1 else 0
    raise unknown("collective", kind, KINDS)


def expected_steps(kind: str, n: int, algorithm: str = "ring") -> int:
    """Steps that follow one another (the latency term): ring all-reduce 2(n-1), ring halves and all-to-all n-1, trees by their depth."""
    depth = max(n - 1, 0).bit_length()
    if kind == "all_reduce":
        return 2 * (n - 1) if algorithm == "ring" else 2 * (n.bit_length() - 1)
    return {"broadcast": depth, "send_recv": min(n - 1, 1)}.get(kind, n - 1)
