"""KV blocks of one worker group: which are free, who uses which, and which still hold a prefix worth keeping.

A block is in one of three places: *used* (one or more sequences refer to it), *cached* (nobody does, but it holds a full
block of some prefix and may be taken up again) or *free*. Blocks are handed out lowest id first, so that the highest ids
fall free and the cache can shrink from its end.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

ROOT = b""
"""Hash of the empty prefix."""


def chain_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a prefix that ends with a full block, given the hash of what comes before it.

    Cryptographic, because equal hashes share keys and values between callers who do not trust each other.
    """
    return hashlib.blake2b(previous + array("Q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """`capacity` blocks, ids 0..capacity-1. Pure bookkeeping; the bytes are the ranks'."""

    def __init__(self, capacity: int, *, prefix_cache: bool = True) -> None:
        self._capacity = capacity
        self._prefix_cache = prefix_cache
        self._free: list[int] = list(range(capacity))  # heap
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return len(self._references)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None and no change."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = heapq.heappop(self._free)
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def match(self, tokens: Sequence[int], block_tokens: int) -> list[tuple[int, bytes]]:
        """The longest known prefix of `tokens` in full blocks, as (block, chain hash). Takes no reference."""
        found: list[tuple[int, bytes]] = []
        if not self._prefix_cache:
            return found
        previous = ROOT
        for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
            digest = chain_hash(previous, tokens[start : start + block_tokens])
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append((block, digest))
            previous = digest
        return found

    def take(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that `match` found."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1

    def register(self, block: int, previous: bytes, tokens: Sequence[int]) -> bytes:
        """Say that a used block now holds a full block of a prefix; its chain hash. The first block with a content keeps it."""
        digest = chain_hash(previous, tokens)
        if self._prefix_cache and digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest
        return digest

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference each. The end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count:
                self._references[block] = count
                continue
            del self._references[block]
            if block >= self._capacity:
                self._forget(block)
            elif block in self._hash_of:
                self._cached[block] = None
            else:
                heapq.heappush(self._free, block)

    def grow(self, capacity: int) -> None:
        """Blocks up to `capacity` have become usable."""
        if capacity < self._capacity:
            raise ValueError(f"grow from {self._capacity} to {capacity} blocks")
        for block in range(self._capacity, capacity):
            if block not in self._references:
                heapq.heappush(self._free, block)
        self._capacity = capacity

    def shrink(self, capacity: int) -> bool:
        """Stop handing out blocks from `capacity` on. True when none of them is used, so that their memory may go."""
        if capacity < self._capacity:
            self._capacity = capacity
            self._free = [block for block in self._free if block < capacity]
            heapq.heapify(self._free)
            for block in [block for block in self._cached if block >= capacity]:
                del self._cached[block]
                self._forget(block)
        return all(block < capacity for block in self._references)

    def highest_used(self) -> int:
        """Highest id in use, -1 when none is."""
        return max(self._references, default=-1)

    def drop_cache(self) -> None:
        for block in self._cached:
            self._forget(block)
            heapq.heappush(self._free, block)
        self._cached.clear()

    def check(self) -> None:
        """AssertionError unless every block is in exactly one place and the prefix index agrees with the blocks."""
        places = [*self._free, *self._cached, *(block for block in self._references if block < self._capacity)]
        assert sorted(places) == list(range(self._capacity)), "a block is lost or in two places"
        assert all(count > 0 for count in self._references.values()), "a used block without a reference"
        assert all(self._block_of[digest] == block for block, digest in self._hash_of.items()), "prefix index disagrees"
        assert len(self._block_of) == len(self._hash_of), "prefix index leaks"
        assert all(block in self._hash_of for block in self._cached), "a cached block without content"
        assert not any(block in self._hash_of for block in self._free), "a free block with content"

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
