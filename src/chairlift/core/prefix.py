"""What identifies the KV of a block: a keyed hash of its tokens and of all before them.

Keyed, so that no client can craft a collision; chained, since keys and values depend on the whole context; salted by
tenant, so that nobody can probe what another has asked. Only pinned beginnings are the same for all.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from chairlift.core.request import Request


class PrefixHashes:
    """``secret`` is the key; random unless given."""

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        self._block_size = block_size
        self._secret = os.urandom(32) if secret is None else secret
        self._public: set[bytes] = set()  # hashes of pinned beginnings, which carry no tenant's salt

    def content(self, request: Request, i: int, g: int) -> bytes:
        """What identifies the KV of group g in the request's i-th block, which must be full."""
        return of_group(self.hash(request, i), g)

    def hash(self, request: Request, i: int) -> bytes:
        """Hash of the tokens in the request's i-th full block and all before it, computed once.

        Salted by tenant, from the first block on that is not part of a pinned beginning.
        """
        hashes = request.block_hashes
        while len(hashes) <= i:
            before = hashes[-1] if hashes else b""
            tokens = self._tokens(request.token_ids, len(hashes))
            content = self._digest(before + tokens)
            if (not hashes or before in self._public) and content not in self._public:
                content = self._digest(before + request.tenant.encode() + b"/" + tokens)
            hashes.append(content)
        return hashes[i]

    def publish(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """From now on these beginnings are the same for all tenants; yields the hash of each full block."""
        content = b""
        for i in range(len(token_ids) // self._block_size):
            content = self._digest(content + self._tokens(token_ids, i))
            self._public.add(content)
            yield content

    def _tokens(self, token_ids: Sequence[int], i: int) -> bytes:
        return array("q", token_ids[i * self._block_size : (i + 1) * self._block_size]).tobytes()

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=16, key=self._secret).digest()


def of_group(content: bytes, g: int) -> bytes:
    """The identity of one group's KV for a block's hash."""
    return content + bytes((g,)) if g else content
