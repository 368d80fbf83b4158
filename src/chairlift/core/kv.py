"""Paged KV memory: which blocks exist, who owns them, and what they hold.

`KVManager` knows requests: it is the only writer of their block tables, hashes, reservations and ``num_computed``.
Blocks themselves are counted by `BlockPool`s: one for the device, and one for each place to swap to, host memory and
disk. The latter also take cached prefixes that the device has no more room for.

With sliding windows the layers form groups (`Capacity.windows`). A block holds its positions for the layers of one
group, and a table has G entries for each ``block_size`` positions, one a group. A windowed group gives its blocks back
as its window passes; NO_BLOCK stays in the table.

| where a block table is read          | entries                                                     |
|--------------------------------------|-------------------------------------------------------------|
| positions of the i-th block, group g | ``table[i * G + g]``                                        |
| ``[: i * G]``                        | all of the first i blocks' positions                        |
| NO_BLOCK                             | nothing there will be read again                            |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chairlift.core.layout import NO_BLOCK, Layout
from chairlift.core.plan import BlockOp, BlockOpKind, Capacity
from chairlift.core.pool import BlockPool
from chairlift.core.prefix import PrefixHashes, of_group
from chairlift.core.request import Request, Reservation
from chairlift.core.tiers import Tiers


@dataclass(frozen=True, slots=True)
class Hit:
    """KV that exists already for the beginning of a request.

    Fields:
        num_tokens: how many tokens it covers.
        table: as much of a block table; NO_BLOCK also where a block is to be swapped in or copied.
        swaps: (index in the table, host or disk block, content hash or b"") of the former.
        copies: (index in the table, block) of the latter. A block of a windowed group that is in use is not shared
            with strangers: its owner may have been promised that it comes back when the window has passed.
    """

    num_tokens: int = 0
    table: Sequence[int] = ()
    swaps: Sequence[tuple[int, int, bytes]] = ()
    copies: Sequence[tuple[int, int]] = ()


NO_HIT = Hit()


class KVManager:
    """Gives requests their blocks. Every method either does all it says or changes nothing.

    ``reserved`` counts blocks promised to running requests and not yet taken; they are in the free list, but only
    their owners may take them. Invariant: ``reserved <= pool.num_free``.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        max_chunk: int,
        enable_prefix_caching: bool = True,
        secret: bytes | None = None,
        disk_contents: Iterable[tuple[int, bytes]] = (),
    ) -> None:
        """
        Args:
            max_chunk: most tokens of a request computed in one step.
            secret: keys the prefix hashes; random unless given.
            disk_contents: (block of the disk, content hash) of prefixes kept from an earlier run with the same secret.
        """
        self.block_size = capacity.block_size
        self.layout = Layout(capacity.windows, capacity.block_size, max_chunk)
        self.pool = BlockPool(capacity.num_blocks)
        self.tiers = Tiers(capacity, disk_contents if enable_prefix_caching else ())
        self.enable_prefix_caching = enable_prefix_caching
        self.reserved = 0
        self._hashes = PrefixHashes(capacity.block_size, secret)
        self._pins: dict[bytes, int | None] = {}  # content of a pinned block -> the block, once it exists
        self._ops: list[BlockOp] = []

    # -- who has how much

    @property
    def num_pinned(self) -> int:
        """Blocks that pinned prefixes hold, or will."""
        return len(self._pins)

    @property
    def num_available(self) -> int:
        """Blocks that anybody may take."""
        return self.pool.num_free - self.reserved

    def private_blocks(self, request: Request) -> int:
        """Blocks that become free when this request ends."""
        return sum(block != NO_BLOCK and self.pool.refs(block) == 1 for block in request.block_table)

    def num_held(self, request: Request) -> int:
        """Blocks of the device that a request holds."""
        return sum(block != NO_BLOCK for block in request.block_table)

    def freed_by(self, requests: Sequence[Request]) -> int:
        """Blocks that become available to others when all of these leave."""
        owned = Counter(block for request in requests for block in request.block_table if block != NO_BLOCK)
        free = sum(self.pool.refs(block) == owners for block, owners in owned.items())
        reservations = {id(r.reservation): r.reservation for r in requests if r.reservation}.values()
        leaving = set(map(id, requests))
        return free + sum(held.left for held in reservations if leaving.issuperset(map(id, held.members)))

    def lasting(self, table: Sequence[int], own: int) -> int:
        """Blocks of a table that stand for as many of those a sequence may ever hold. What a windowed group shares with
        others does not: it is no block more for anybody when the window has moved on. ``own``: owners that it has in
        this sequence."""
        count = sum(block != NO_BLOCK for block in table)
        for g, _ in self.layout.windowed:
            row = table[g :: self.layout.num_groups]
            count -= sum(block != NO_BLOCK and self.pool.refs(block) > own for block in row)
        return count

    def blocks_to_copy(self, request: Request) -> int:
        """Blocks that the request's next token goes into and that it shares with other samples."""
        first = request.num_planned // self.block_size * self.layout.num_groups
        return sum(self.pool.refs(block) > 1 for block in request.block_table[first : first + self.layout.num_groups])

    # -- prefix cache

    def lookup(self, request: Request) -> Hit:
        """What need not be computed: the longest known beginning of the request's tokens, or its own swapped KV.

        Changes no block. Never covers the last token: logits need one query. A cached prefix is of no use while prompt
        logprobs are wanted, since those need every prompt token to be computed.
        """
        if request.host_table:
            return self._swapped_hit(request)
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return NO_HIT
        end = self._hit_length(request, (len(request.token_ids) - 1) // self.block_size)
        if not end:
            return NO_HIT
        table: list[int] = []
        swaps: list[tuple[int, int, bytes]] = []
        copies: list[tuple[int, int]] = []
        for i in range(end):
            for g, window in enumerate(self.layout.windows):
                content = self._hashes.content(request, i, g)
                block = self.pool.find(content)
                if i < self.layout.first_kept(end * self.block_size, window):
                    block = NO_BLOCK
                elif block is None:
                    block, address = NO_BLOCK, self.tiers.find(content)
                    assert address is not None
                    swaps.append((len(table), address, content))
                elif window and self.pool.refs(block):
                    copies.append((len(table), block))
                    block = NO_BLOCK
                table.append(block)
        return Hit(end * self.block_size, table, swaps, copies)

    def _hit_length(self, request: Request, most: int) -> int:
        """Blocks of the longest hit. A full group must have all of them, a windowed one those in its last window."""
        end = most
        if self.layout.full:
            end = next((i for i in range(most) if not all(self._known(request, i, g) for g in self.layout.full)), most)
        i = end
        while self.layout.windowed and i > 0:
            i -= 1
            read = end * self.block_size
            needy = [g for g, window in self.layout.windowed if i >= self.layout.first_kept(read, window)]
            if not needy:
                break
            if not all(self._known(request, i, g) for g in needy):
                end = i
        return end

    def _known(self, request: Request, i: int, g: int) -> bool:
        content = self._hashes.content(request, i, g)
        return self.pool.find(content) is not None or self.tiers.find(content) is not None

    def _swapped_hit(self, request: Request) -> Hit:
        """A swapped request finds its KV where it was put, or better, still on the device."""
        table: list[int] = []
        swaps: list[tuple[int, int, bytes]] = []
        for at, address in enumerate(request.host_table):
            i, g = divmod(at, self.layout.num_groups)
            full = self.enable_prefix_caching and (i + 1) * self.block_size <= request.num_swapped
            content = self._hashes.content(request, i, g) if full else b""
            block = self.pool.find(content) if full else None
            if block is not None and self.layout.windows[g] and self.pool.refs(block):
                block = None
            if address != NO_BLOCK and block is None:
                swaps.append((at, address, content))
            table.append(NO_BLOCK if address == NO_BLOCK or block is None else block)
        return Hit(request.num_swapped, table, swaps)

    def pin(self, token_ids: Sequence[int]) -> None:
        """From now on the KV of this beginning is shared by all tenants, and stays once it was computed."""
        if not self.enable_prefix_caching:
            return
        end = len(token_ids) // self.block_size * self.block_size
        for i, content in enumerate(self._hashes.publish(token_ids)):
            for g, window in enumerate(self.layout.windows):
                if i >= self.layout.first_kept(end, window):
                    self._pins.setdefault(of_group(content, g), None)
                    self._hold(of_group(content, g), window)

    def _hold(self, pinned: bytes, window: int) -> None:
        """Keeps a pinned block for good, if it exists. One of a windowed group will not come back to whoever computed
        it, so it is kept only while there is another that nobody was promised."""
        block = self.pool.find(pinned)
        if block is None or self._pins[pinned] is not None:
            return
        if self.num_available > 0 or (self.pool.refs(block) and not window):
            self.pool.share(block)
            self._pins[pinned] = block

    # -- a request's life

    def admit(
        self,
        request: Request,
        hit: Hit,
        n: int,
        *,
        total: int = 0,
        promise: bool = False,
        headroom: int = 0,
    ) -> bool:
        """Boards a request: takes its hit blocks and room for ``n`` tokens after them.

        Args:
            hit: what `lookup` returned just now.
            total: blocks that must be there for the request altogether, those taken now included.
            promise: keep those of ``total`` that are not taken now for this request.
            headroom: blocks that must stay available to others.
        Returns:
            False, and nothing has changed, if the blocks are not there.
        """
        if self.missing(hit, n, total, headroom) > 0:
            return False
        slots = self.layout.blocks_for(hit.num_tokens + n)
        added = slots * self.layout.num_groups - len(hit.table)
        later = self._later(hit, n, total)
        shared = [block for block in hit.table if block != NO_BLOCK]
        for block in shared:
            self.pool.share(block)
        for _, address, _ in hit.swaps:  # taking a block may push a cached prefix into the place of another
            self.tiers.share(address)
        table = list(hit.table)
        for at, address, content in hit.swaps:
            table[at] = self._take()
            self._ops.append(BlockOp(BlockOpKind.SWAP_IN, address, table[at], content))
        for at, block in hit.copies:
            table[at] = self._take()
            self._ops.append(BlockOp(BlockOpKind.COPY, block, table[at]))
        table.extend(self._take() for _ in range(added))
        for _, address, _ in hit.swaps:
            self.tiers.drop(address)
        self._release_swapped(request)
        request.block_table, request.table = table, None
        request.num_computed = hit.num_tokens
        request.num_indexed = min((at for at, _, _ in hit.swaps), default=len(hit.table)) // self.layout.num_groups
        request.writable_end = slots * self.block_size
        if promise:
            for_prompt = total < self.layout.full_blocks(request)
            request.reservation = Reservation(later, for_prompt, [request])
            self.reserved += later
        return True

    def missing(self, hit: Hit, n: int, total: int, headroom: int) -> int:
        """How many more blocks would have to be available for `admit` to succeed with these; 0 or less if it does."""
        revived = sum(block != NO_BLOCK and self.pool.refs(block) == 0 for block in hit.table)  # not for taking
        return self._new(hit, n) + revived + self._later(hit, n, total) + headroom - self.num_available

    def _new(self, hit: Hit, n: int) -> int:
        """Blocks that are taken at once for ``n`` tokens after a hit."""
        added = self.layout.blocks_for(hit.num_tokens + n) * self.layout.num_groups - len(hit.table)
        return added + len(hit.swaps) + len(hit.copies)

    def _later(self, hit: Hit, n: int, total: int) -> int:
        """Of ``total`` blocks, those that are neither hit nor taken at once."""
        return max(0, total - self.lasting(hit.table, 0) - self._new(hit, n))

    def grow(self, request: Request, n: int) -> bool:
        """Makes the next ``n`` positions writable: appends blocks, and copies the first one if others share it."""
        end = request.num_planned + n
        if end <= request.writable_end:
            return True
        table, groups = request.block_table, self.layout.num_groups
        first = request.num_planned // self.block_size * groups
        copies = [at for at in range(first, min(first + groups, len(table))) if self.pool.refs(table[at]) > 1]
        added = max(0, self.layout.blocks_for(end) * groups - len(table))
        need, reservation = added + len(copies), request.reservation
        own = min(need, reservation.left) if reservation else 0
        if need - own > self.num_available:
            return False
        if reservation:
            reservation.left -= own
            self.reserved -= own
        for at in copies:
            shared, table[at] = table[at], self._take()
            self._ops.append(BlockOp(BlockOpKind.COPY, shared, table[at]))
            self.pool.drop(shared)
        table.extend(self._take() for _ in range(added))
        request.table = None
        request.writable_end = len(table) // groups * self.block_size
        return True

    def commit(self, request: Request, n: int) -> None:
        """The KV of the next ``n`` tokens exists now; blocks that became full can be found by others from here on."""
        request.num_computed += n
        if request.num_computed // self.block_size != request.num_indexed:
            self._filled(request)

    def _filled(self, request: Request) -> None:
        """Indexes the blocks that are full, and gives back those whose window has passed."""
        full, groups, table = request.num_computed // self.block_size, self.layout.num_groups, request.block_table
        if self.enable_prefix_caching:
            for i in range(request.num_indexed, full):
                for g in range(groups):
                    if table[i * groups + g] != NO_BLOCK:
                        content = self._hashes.content(request, i, g)
                        self.pool.index(table[i * groups + g], content)
                        if content in self._pins:
                            self._hold(content, self.layout.windows[g])
                            self.settle(request)  # before the next: a block of a window that stays does not come back
        request.num_indexed = full
        if not self.layout.windowed:
            return
        slid = full
        for g, window in self.layout.windowed:
            first = self.layout.first_kept(request.num_computed, window)
            for at in range(request.num_slid * groups + g, first * groups, groups):
                if table[at] != NO_BLOCK:
                    self.pool.drop(table[at])
                    table[at] = NO_BLOCK
                    request.table = None
            slid = min(slid, first)
        request.num_slid = slid
        if request.reservation:
            self._settle(request.reservation)

    def fork(self, parent: Request, child: Request) -> None:
        """The child shares the parent's computed tokens, and its reservation if that is enough for both."""
        if parent.reservation and parent.reservation.for_prompt:
            self._leave_reservation(parent)
        used = self.layout.blocks_for(parent.num_computed) * self.layout.num_groups
        child.block_table = parent.block_table[:used]
        for block in child.block_table:
            if block != NO_BLOCK:
                self.pool.share(block)
        child.num_computed = child.num_planned = parent.num_computed
        child.num_indexed, child.num_slid = parent.num_indexed, parent.num_slid
        child.block_hashes = list(parent.block_hashes)
        # Whoever of them writes first into a block that is not full must copy it.
        for request in (parent, child):
            request.table = None
            request.writable_end = request.num_computed
        if parent.reservation:
            child.reservation = parent.reservation
            child.reservation.members.append(child)

    def settle(self, request: Request) -> None:
        """After forks: what the samples may still need together is less than what the prompt was promised."""
        if request.reservation:
            self._settle(request.reservation)

    def _settle(self, reservation: Reservation) -> None:
        """Keeps of a reservation what its members may still need."""
        most = reservation.left + (0 if reservation.for_prompt else max(0, self.num_available))
        need = min(self._need(reservation.members), most)
        self.reserved += need - reservation.left
        reservation.left = need

    def _need(self, members: Sequence[Request]) -> int:
        """Most blocks that these may still take, all together."""
        layout, groups = self.layout, self.layout.num_groups
        whole = 0  # in a group that never gives blocks back
        partial: Counter[int] = Counter()
        for request in members:
            whole += max(0, layout.whole_group(request) - len(request.block_table) // groups)
            if request.num_computed % self.block_size and request.writable_end <= request.num_computed:
                partial[request.block_table[request.num_computed // self.block_size * groups]] += 1
        whole += sum(owners - 1 for owners in partial.values())  # each but the last copies it
        if members and members[0].params.use_beam_search:  # beams that the next round may add
            missing = members[0].params.width - sum(request.num_samples for request in members)
            whole += missing * (layout.blocks_for(members[0].max_len) - members[0].num_computed // self.block_size)
        return whole * len(layout.full) + sum(min(whole, self._need_of_window(members, g)) for g, _ in layout.windowed)

    def _need_of_window(self, members: Sequence[Request], g: int) -> int:
        """What the windows of all of them may hold, less what these hold now and will give back."""
        groups, most = self.layout.num_groups, 0
        owners: Counter[int] = Counter()
        for request in members:
            prefilling = request.num_samples > 1 or request.num_computed < len(request.token_ids) - 1
            window = self.layout.window_blocks(self.layout.windows[g], prefilling)
            most += request.num_samples * window
            # What lies behind is padding, or the room of the one who computed the prompt: of no use to the others.
            end = min(self.layout.blocks_for(request.max_len), request.num_slid + window)
            owners.update(request.block_table[request.num_slid * groups + g : end * groups : groups])
        del owners[NO_BLOCK]
        return max(0, most - sum(self.pool.refs(block) == count for block, count in owners.items()))

    def release(self, request: Request) -> None:
        """Frees all a request holds; its KV is gone. The end of the chain goes first, so that it is reused first."""
        for block in reversed(request.block_table):
            if block != NO_BLOCK:
                self.pool.drop(block)
        self._release_swapped(request)
        request.block_table, request.table = [], None
        request.num_computed = request.writable_end = request.num_indexed = request.num_slid = 0
        self._leave_reservation(request)

    def _leave_reservation(self, request: Request) -> None:
        reservation, request.reservation = request.reservation, None
        if reservation:
            reservation.members.remove(request)
            self._settle(reservation)

    # -- other places

    def swap_out(self, request: Request) -> bool:
        """Moves a request's KV to host memory, or to disk when that is full; False, with no change, if both are."""
        groups = self.layout.num_groups
        entries = request.block_table[: self.layout.blocks_for(request.num_computed) * groups]
        contents: list[bytes] = []
        there: list[int | None] = []  # where a block's content already is: its hash finds it
        for at, block in enumerate(entries):
            i, g = divmod(at, groups)
            full = self.enable_prefix_caching and (i + 1) * self.block_size <= request.num_computed
            contents.append(self._hashes.content(request, i, g) if full and block != NO_BLOCK else b"")
            there.append(self.tiers.find(contents[-1]) if contents[-1] else None)
        missing = sum(block != NO_BLOCK and known is None for block, known in zip(entries, there, strict=True))
        revived = sum(address is not None and self.tiers.refs(address) == 0 for address in there)
        if not entries or missing + revived > self.tiers.num_free:
            return False
        for address in there:  # before others are taken, so that none of these is pushed out
            if address is not None:
                self.tiers.share(address)
        table = [NO_BLOCK if address is None else address for address in there]
        for at, (block, content) in enumerate(zip(entries, contents, strict=True)):
            if block != NO_BLOCK and table[at] == NO_BLOCK:
                table[at] = self.tiers.take()
                self._ops.append(BlockOp(BlockOpKind.SWAP_OUT, block, table[at], content))
                if content:
                    self.tiers.index(table[at], content)
        num_computed = request.num_computed
        self.release(request)
        request.host_table, request.num_swapped = table, num_computed
        return True

    def _take(self) -> int:
        """A block of the device. The cached prefix it held until now moves to another place, if there is one."""
        block, content = self.pool.take()
        if content and self.tiers.find(content) is None:
            self._keep(block, content)
        return block

    def _keep(self, block: int, content: bytes) -> None:
        """Copies a cached block to the last place there is, if that has room and not the same already."""
        last = self.tiers.last
        if last is not None and last.pool.num_free and last.find(content) is None:
            address = last.take()
            self._ops.append(BlockOp(BlockOpKind.SWAP_OUT, block, address, content))
            self.tiers.index(address, content)
            self.tiers.drop(address)

    def save(self) -> None:
        """Copies all cached prefixes to the last tier, the most recently used last."""
        for block, content in self.pool.contents():
            self._keep(block, content)

    def _release_swapped(self, request: Request) -> None:
        for address in reversed(request.host_table):
            if address != NO_BLOCK:
                self.tiers.drop(address)
        request.host_table, request.num_swapped = [], 0

    def forget_all(self) -> None:
        """Nothing is known any more of what device and host hold. No request may hold a block. (The disk checks what
        it reads.)"""
        for content, block in self._pins.items():
            if block is not None:
                self.pool.drop(block)
                self._pins[content] = None
        self.pool.forget(range(self.pool.num_blocks))
        self.tiers.forget_host()
        self.tiers.forget(op.dst for op in self._ops if op.kind is BlockOpKind.SWAP_OUT)
        self._ops.clear()

    def take_ops(self) -> tuple[BlockOp, ...]:
        """The block operations since the last call, in order."""
        if not self._ops:
            return ()
        ops, self._ops = tuple(self._ops), []
        return ops

    # -- checking

    def check(self, live: Iterable[Request]) -> None:
        """Recomputes from all live requests what this class keeps, and raises AssertionError on any difference."""
        owners: Counter[int] = Counter(block for block in self._pins.values() if block is not None)
        swapped: Counter[int] = Counter()
        reservations: dict[int, Reservation] = {}
        for request in live:
            table = [block for block in request.block_table if block != NO_BLOCK]
            owners.update(table)
            swapped.update(address for address in request.host_table if address != NO_BLOCK)
            self._check_request(request, table)
            if request.reservation:
                reservations[id(request.reservation)] = request.reservation
                assert request in request.reservation.members, f"{request.key}: reservation of strangers"
        self.pool.check(owners)
        self.tiers.check(swapped)
        reserved = sum(reservation.left for reservation in reservations.values())
        assert reserved == self.reserved, f"{self.reserved} blocks reserved, requests hold {reserved}"
        assert 0 <= self.reserved <= self.pool.num_free, "more blocks promised than free"

    def _check_request(self, request: Request, table: Sequence[int]) -> None:
        room = len(request.block_table) // self.layout.num_groups * self.block_size
        assert len(request.block_table) % self.layout.num_groups == 0, f"{request.key}: a table of broken rows"
        assert request.num_computed <= min(room, len(request.token_ids)), f"{request.key}: KV without a token or block"
        assert request.num_computed <= request.num_planned or not table, f"{request.key}: computed and never planned"
        assert request.writable_end <= room, f"{request.key}: writes past its blocks"
        assert len(set(table)) == len(table), f"{request.key}: a block twice"
        assert request.table is None or request.table == tuple(request.block_table), f"{request.key}: stale table"
        assert not (request.host_table and table), f"{request.key}: in two places"
