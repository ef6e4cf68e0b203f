"""Owns the order in which residents leave an expert pool: one small class a policy, and the table of their names.

It must not know about bytes in a pool, pins, time or engines: ``policies.cache.ExpertPool`` asks it for a victim, tells it what was
used and what left. Experts are keys; ``now`` is any integer that grows from atomic set to atomic set (a row, or step * L + layer).
A pool brings in and touches the members of a set after its victims have left, in ascending key: what a policy learns from a set
(a count, a ghost that returned) counts from the next set on.

Belady's rule is the bound for demand loading of equally large experts. A preloaded static set may still beat it: it pays no first
touches and its misses bypass the pool. With experts of unequal size farthest-next-use is a heuristic.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from moesim.errors import InputError, did_you_mean

NEVER = 2**62  # later than any access index; its negative is earlier than any
Allowed = Callable[[int], bool]


class CachePolicy(Protocol):
    """Order in which residents of a pool leave it. ``admits`` is False where a miss never becomes resident."""

    admits: ClassVar[bool]

    def touch(self, key: int, now: int, used: bool = True, n_bytes: int = 1) -> None:
        """Note that ``key`` of ``n_bytes`` was used at access index ``now``; ``used=False``: it only entered (prefetch, preload)."""

    def victim(self, allowed: Allowed, now: int | None = None) -> int | None:
        """Return the next resident to leave among those allowed, or None; it stays until ``remove``.

        ``now`` is the access for which room is made; None: no access in particular.
        """

    def remove(self, key: int) -> None:
        """Note that ``key`` left the pool."""


class Static:
    """The preloaded set never changes; misses pass through transient slots."""

    admits: ClassVar[bool] = False

    def touch(self, key: int, now: int, used: bool = True, n_bytes: int = 1) -> None:
        pass

    def victim(self, allowed: Allowed, now: int | None = None) -> int | None:
        return None

    def remove(self, key: int) -> None:
        pass


class LRU:
    """The least recently used leaves. O(1), plus one look at each disallowed key at the old end."""

    admits: ClassVar[bool] = True

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()  # oldest first

    def touch(self, key: int, now: int, used: bool = True, n_bytes: int = 1) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def victim(self, allowed: Allowed, now: int | None = None) -> int | None:
        return _first(self._order, allowed)

    def remove(self, key: int) -> None:
        del self._order[key]


class _Ranked:
    """Residents in a heap by a rank that changes with each touch; outdated entries are dropped when met, or in one sweep."""

    def __init__(self) -> None:
        self._rank: dict[int, tuple[Any, ...]] = {}  # of residents only; the last element is the key
        self._heap: list[tuple[Any, ...]] = []

    def _place(self, key: int, rank: tuple[Any, ...]) -> None:
        self._rank[key] = rank
        heapq.heappush(self._heap, rank)
        if len(self._heap) > 4 * len(self._rank) + 64:  # keeps memory flat, amortised O(1) per touch
            self._heap = list(self._rank.values())
            heapq.heapify(self._heap)

    def victim(self, allowed: Allowed, now: int | None = None) -> int | None:
        heap, rank = self._heap, self._rank
        aside: list[tuple[Any, ...]] = []
        found = None
        while heap:
            top = heap[0]
            if rank.get(top[-1]) != top:
                heapq.heappop(heap)
            elif allowed(top[-1]):
                found = int(top[-1])
                break
            else:
                aside.append(heapq.heappop(heap))
        for entry in aside:
            heapq.heappush(heap, entry)
        return found

    def remove(self, key: int) -> None:
        del self._rank[key]


class LFU(_Ranked):
    """The one with the fewest uses since the start leaves; tie: the older last use, then the smaller key. Counts survive eviction."""

    admits: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}

    def touch(self, key: int, now: int, used: bool = True, n_bytes: int = 1) -> None:
        uses = self._uses.get(key, 0) + used
        self._uses[key] = uses
        self._place(key, (uses, now, key))


class _Inflating(_Ranked):
    """Base of policies with a value that ages: value = worth + L, set at each touch; the smallest leaves, and L is what it had.

    L (the inflation) is raised to the smallest value among the residents whenever one leaves, so it never exceeds a resident's value,
    whoever is pinned or dropped for another reason. Tie: the older touch, then the smaller key.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inflation = 0.0

    def remove(self, key: int) -> None:
        lowest = super().victim(lambda _key: True)
        if lowest is not None:
            self._inflation = self._rank[lowest][0]
        super().remove(key)


class AgingLFU(_Inflating):
    """LFU with dynamic aging: value = uses since it entered + L, so that a past favourite is outlived by newcomers.

    Source: Arlitt, Cherkasova, Dilley, Friedrich, Jin 2000, "Evaluating content management techniques for Web proxy caches",
    ACM SIGMETRICS Performance Evaluation Review 27(4) (LFU-DA). Counts do not survive eviction, as there.
    """

    admits: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}

    def touch(self, key: int, now: int, used: bool = True, n_bytes: int = 1) -> None:
        uses = self._uses[key] = self._uses.get(key, 0) + used
        self._place(key, (uses + self._inflation, now, key))

    def remove(self, key: int) -> None:
        super().remove(key)
        del self._uses[key]


class CostAware(_Inflating):
    """GreedyDual-Size: value = cost of fetching it again / its size + L; the cheapest per byte of room leaves.

    The cost of a miss is that of its transfer, in bytes: its own and ``PER_TRANSFER_BYTES`` for the fixed part, so value =
    1 + PER_TRANSFER_BYTES / n_bytes + L. With experts of one size all values rise alike and the policy is LRU (but for the order of
    what a warm cache begins with: there all are equal, and the smaller key leaves first); it is LRU for any sizes if there is no fixed part. It departs from LRU where small experts lie beside large ones: the small stay longer.

    Source: Cao and Irani 1997, "Cost-aware WWW proxy caching algorithms", USENIX Symposium on Internet Technologies and Systems;
    the inflation L is that of Young 1994, "The k-server dual and loose competitiveness for paging", Algorithmica 11(6).
    """

    admits: ClassVar[bool] = True
    PER_TRANSFER_BYTES: ClassVar[int] = 150_000  # 75 us fixed cost of a read, at 2 GB/s: the SSD of hardware profile ref-16gb

    def touch(self, key: int, now: int, used: bool = True, n_bytes: int = 1) -> None:
        self._place(key, (1.0 + self.PER_TRANSFER_BYTES / n_bytes + self._inflation, now, key))


class LRUK(_Ranked):
    """LRU-K with K = 2: the one whose last use but one is oldest leaves; who has no two uses yet leaves before all others.

    Tie: the older last use (or entry), then the smaller key. The history of those who left is kept for ever, as experts are few
    (the Retained Information Period is infinite); the Correlated Reference Period is 0, as uses in two sets are two uses.

    Source: O'Neil, O'Neil, Weikum 1993, "The LRU-K page replacement algorithm for database disk buffering", ACM SIGMOD.
    """

    admits: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, tuple[int, int]] = {}  # last use but one, last use

    def touch(self, key: int, now: int, used: bool = True, n_bytes: int = 1) -> None:
        before, last = self._uses.get(key, (-NEVER, -NEVER))
        if used:
            before, last = self._uses[key] = (last, now)
        self._place(key, (before, last if used else now, key))


class ARC:
    """Adaptive replacement cache: two LRU lists, used once (T1) and used again (T2), and a target for T1 that learns from ghosts.

    Ghosts B1 and B2 are the keys that left T1 and T2. A key that returns from B1 raises the target by ``max(1, |B2| / |B1|)``, one that
    returns from B2 lowers it by ``max(1, |B1| / |B2|)``; either enters T2. The victim is the oldest of T1 while ``|T1|`` is above the
    target, else the oldest of T2; where none of that list may leave, of the other one. With c the most residents there have been,
    ``|T1| + |B1| <= c`` and all four lists hold at most 2 c keys.

    Adapted to atomic sets: the target moves when the set has entered, so a returning ghost steers the next set's victims, not its own.
    A prefetched key enters T1 as not used yet and moves no target; its first use is the one that counts as "used once".

    Source: Megiddo and Modha 2003, "ARC: a self-tuning, low overhead replacement cache", USENIX FAST.
    """

    admits: ClassVar[bool] = True

    def __init__(self) -> None:
        self._once: OrderedDict[int, bool] = OrderedDict()  # T1, oldest first: whether it was used
        self._again: OrderedDict[int, None] = OrderedDict()  # T2
        self._ghosts: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())  # B1, B2
        self._target = 0.0
        self._capacity = 0

    def touch(self, key: int, now: int, used: bool = True, n_bytes: int = 1) -> None:
        once, again, (left_once, left_again) = self._once, self._again, self._ghosts
        if key in again or once.get(key, False):
            if used:
                once.pop(key, None)
                again[key] = None
                again.move_to_end(key)
            return
        if key not in once and used and (key in left_once or key in left_again):
            if key in left_once:
                self._target = min(self._capacity, self._target + max(1.0, len(left_again) / len(left_once)))
            else:
                self._target = max(0.0, self._target - max(1.0, len(left_once) / len(left_again)))
            again[key] = None
        else:
            once[key] = used
            once.move_to_end(key)
        left_once.pop(key, None)
        left_again.pop(key, None)
        self._capacity = max(self._capacity, len(once) + len(again))
        self._forget()

    def victim(self, allowed: Allowed, now: int | None = None) -> int | None:
        first, second = (self._once, self._again) if len(self._once) > self._target else (self._again, self._once)
        found = _first(first, allowed)
        return _first(second, allowed) if found is None else found

    def remove(self, key: int) -> None:
        if key in self._once:
            del self._once[key]
            self._ghosts[0][key] = None
        else:
            del self._again[key]
            self._ghosts[1][key] = None
        self._forget()

    def _forget(self) -> None:
        left_once, left_again = self._ghosts
        while left_once and len(self._once) + len(left_once) > self._capacity:
            left_once.popitem(last=False)
        while left_again and len(self._once) + len(self._again) + len(left_once) + len(left_again) > 2 * self._capacity:
            left_again.popitem(last=False)


class LeastStale:
    """Who was not used in the current forward pass (stale) leaves before who was; among equals the one whose layer's turn is farthest.

    Layers run in a fixed order, so within a pass an expert of a layer that has just run cannot be wanted before the next pass, and one
    of the layer to come may be wanted at once. Recency ranks them the wrong way round: under LRU a global cache below the working set
    of one pass never hits. Turns go backwards from the present layer: it, the one before, and so on round to the one that comes next.
    Tie: the older last use, then the order of entry. In a cache of one layer all keys have one turn: once that is known, it is LRU.

    This is our reading of "Least-Stale" in Hoang, Jaiswal, Samragh, Cho 2026, "SpecMD: a comprehensive study on speculative expert
    prefetching", arXiv 2602.03921, from its abstract and from descriptions by others; its full text was not at hand. These agree on the
    two generations (stale before current) and on the use of layer order, and differ on the order within a generation (FIFO; lowest layer).

    The length of a pass is not given but learned: the greatest common divisor of the gaps between uses of the same key (L where ``now``
    is step * L + layer; a multiple of it at first). Until a key is used twice all count as used in one pass, in the order of use.
    """

    admits: ClassVar[bool] = True

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # last use, or entry, of residents
        self._used: dict[int, int] = {}  # last use of every key
        self._pass = 0  # length of a pass; 0: not known
        self._clock = -1
        self._turns: dict[int, OrderedDict[int, None]] = {}  # by position in the pass: residents, oldest last use first

    def touch(self, key: int, now: int, used: bool = True, n_bytes: int = 1) -> None:
        if used:
            self._clock = max(self._clock, now)
            length = math.gcd(self._pass, now - self._used.get(key, now))
            self._used[key] = now
            if length != self._pass:
                self._pass = length
                residents = sorted(self._last, key=self._last.__getitem__)
                self._turns = {}
                for other in residents:
                    self._turns.setdefault(self._turn(self._last[other]), OrderedDict())[other] = None
        if key in self._last:
            del self._turns[self._turn(self._last[key])][key]
        self._last[key] = now
        self._turns.setdefault(self._turn(now), OrderedDict())[key] = None

    def victim(self, allowed: Allowed, now: int | None = None) -> int | None:
        # A prefetch names the access that it is for, layers ahead; the pass stands at most one set behind its last use.
        now = self._clock + 1 if now is None else min(now, self._clock + 1)
        start = now // self._pass * self._pass if self._pass else -1  # of the current pass
        current = None
        for back in range(self._pass or 1):
            for key in self._turns.get(self._turn(now - back), ()):
                if not allowed(key):
                    continue
                if self._last[key] < start:
                    return key
                current = key if current is None else current
                break  # later keys of this turn are at least as fresh
        return current

    def remove(self, key: int) -> None:
        del self._turns[self._turn(self._last.pop(key))][key]

    def _turn(self, now: int) -> int:
        return now % self._pass if self._pass else 0


class Belady(_Ranked):
    """The one whose next use is farthest leaves (never used again: first of all); tie: the smaller key.

    Source: Belady 1966, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2).

    Parameters
    ----------
    future : mapping of int to sequence of int
        Per key the ascending access indices of its uses, in the same numbering as ``now``; see ``policies.cache.future_uses``.
    """

    admits: ClassVar[bool] = True

    def __init__(self, future: Mapping[int, Sequence[int]]) -> None:
        super().__init__()
        self._future = future

    def touch(self, key: int, now: int, used: bool = True, n_bytes: int = 1) -> None:
        uses = self._future.get(key, ())
        # A key that is used at `now` is done with `now`; a prefetched one may be wanted at `now` still.
        at = bisect_right(uses, now) if used else bisect_left(uses, now)
        self._place(key, (-(uses[at] if at < len(uses) else NEVER), key))


def _first(keys: Mapping[int, Any], allowed: Allowed) -> int | None:
    for key in keys:
        if allowed(key):
            return key
    return None


CACHE_POLICIES: dict[str, type[Any]] = {  # a user may add a class under a name of its own: docs/howto/own-policy.md
    "static": Static,
    "lru": LRU,
    "lfu": LFU,
    "lfu-aging": AgingLFU,
    "lru-k": LRUK,
    "arc": ARC,
    "least-stale": LeastStale,
    "cost-aware": CostAware,
    "belady": Belady,
}


def make_policy(name: str, future: Mapping[int, Sequence[int]] | None = None) -> CachePolicy:
    """Build a cache policy by name.

    Parameters
    ----------
    name : str
        A key of ``CACHE_POLICIES``.
    future : mapping, optional
        Needed by ``belady`` alone, see there.

    Raises
    ------
    InputError
        On an unknown name, or ``belady`` without its future.
    """
    if name not in CACHE_POLICIES:
        raise InputError("cache policy", expected="a known name", got=f'"{name}"', fix=did_you_mean(name, CACHE_POLICIES))
    if name == "belady" and future is None:
        raise InputError("cache policy belady", expected="the future uses of every key", got="none", fix="pass future_uses(...)")
    policy: CachePolicy = CACHE_POLICIES[name](future) if name == "belady" else CACHE_POLICIES[name]()
    return policy
