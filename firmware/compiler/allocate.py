"""Where tiles lie: SBUF and PSUM addresses from lifetimes in trace order.

Memory is reused least recently freed first, so that a tile made anew in each iteration of a loop
rotates through as many buffers as memory allows: double buffering falls out, and the engine that
fills a buffer rarely waits for the one that empties it.
"""

from ..nki.tensor import KernelError

__all__ = ["allocate_psum", "allocate_sbuf"]

ALIGN = 16
"""SBUF tiles start at a multiple of this many bytes: one word."""


def _aligned(size):
    return -(-size // ALIGN) * ALIGN


def _peak(storages):
    """Largest number of these that are live at once."""
    edges = sorted([(s.span[0], 1) for s in storages] + [(s.span[1] + 1, -1) for s in storages])
    live = most = 0
    for _, change in edges:
        live += change
        most = max(most, live)
    return most


def allocate_sbuf(trace):
    """Give every SBUF tile of the trace its address.

    Tiles that come from the same place of the kernel share a pool of equal slots. Every pool gets
    the slots it cannot do without, then memory that is left goes to the pool that has gained least.
    If pools do not fit, all tiles share the memory freely.

    Raises
    ------
    :exc:`KernelError`
        If the tiles that are live at once exceed SBUF; the message lists them.
    """
    config = trace.config
    storages = [s for s in trace.storages if s.buffer == "sbuf" and s.span is not None]
    if not storages:
        return
    pools = {}
    for storage in storages:
        pools.setdefault(storage.site, []).append(storage)
    sizes = {key: _aligned(max(s.partition_bytes for s in pool)) for key, pool in pools.items()}
    need = {key: _peak(pool) for key, pool in pools.items()}
    left = config.sbuf_bytes - sum(need[key] * sizes[key] for key in pools)
    if left >= 0:
        slots = dict(need)
        while True:
            able = [k for k in pools if sizes[k] <= left and slots[k] < len(pools[k])]
            if not able:
                break
            best = min(able, key=lambda k: (slots[k] / need[k], sizes[k]))
            slots[best] += 1
            left -= sizes[best]
        base = 0
        for key, pool in pools.items():
            _rotate(pool, [base + i * sizes[key] for i in range(slots[key])])
            base += slots[key] * sizes[key]
        return
    for policy in (_least_recent, _lowest):
        if _share(storages, config.sbuf_bytes, policy):
            return
    if _pack(storages, config.sbuf_bytes):
        return
    raise _capacity_error(trace, storages)


def _events(storages):
    """Starts and ends in trace order; at the same operation starts come before ends."""
    events = [(s.span[0], 0, i, s) for i, s in enumerate(storages)]
    events += [(s.span[1], 1, i, s) for i, s in enumerate(storages)]
    events.sort(key=lambda event: event[:3])
    return [(kind, storage) for _, kind, _, storage in events]


def _rotate(pool, addresses):
    free = list(addresses)  # least recently freed first
    for kind, storage in _events(pool):
        if kind == 0:
            storage.address = free.pop(0)
        else:
            free.append(storage.address)


def _least_recent(window):
    size, freed, address = window
    return (freed, size, address)


def _lowest(window):
    _, _, address = window
    return address


def _share(storages, capacity, policy):
    """First-come allocation from one free list; whether everything fitted."""
    # Free segments (address, size, freed at), in address order, never merged: a segment remembers
    # when it was freed.
    free = [(0, capacity, -1)]
    for clock, (kind, storage) in enumerate(_events(storages)):
        size = max(_aligned(storage.partition_bytes), ALIGN)
        if kind == 1:
            free.append((storage.address, size, clock))
            free.sort()
            continue
        windows = []
        for i, (address, _, _) in enumerate(free):
            end, freed, j = address, -1, i
            while j < len(free) and free[j][0] == end and end - address < size:
                freed = max(freed, free[j][2])
                end += free[j][1]
                j += 1
            if end - address >= size:
                windows.append(((end - address, freed, address), i, j))
        if not windows:
            return False
        _, i, j = min(windows, key=lambda w: policy(w[0]))
        storage.address = free[i][0]
        end, rest = storage.address + size, []
        last_address, last_size, last_freed = free[j - 1]
        if last_address + last_size > end:
            rest = [(end, last_address + last_size - end, last_freed)]
        free[i:j] = rest
    return True


def _pack(storages, capacity):
    """Place the largest first at the lowest address that is free for all of its life."""
    placed = []
    for storage in sorted(storages, key=lambda s: -s.partition_bytes):
        size, at = _aligned(storage.partition_bytes), 0
        for other in placed:  # in address order
            if other.span[1] < storage.span[0] or storage.span[1] < other.span[0]:
                continue
            if other.address >= at + size:
                break
            at = max(at, other.address + _aligned(other.partition_bytes))
        if at + size > capacity:
            return False
        storage.address = at
        placed.append(storage)
        placed.sort(key=lambda s: s.address)
    return True


def _capacity_error(trace, storages):
    config = trace.config

    def live_at(when):
        return [s for s in storages if s.span[0] <= when <= s.span[1]]

    def total(when):
        return sum(_aligned(s.partition_bytes) for s in live_at(when))

    when = max({s.span[0] for s in storages}, key=total)
    live = sorted(live_at(when), key=lambda s: -s.partition_bytes)
    lines = [
        f"  {storage}: {storage.partition_bytes} bytes per partition, "
        f"allocated at {trace.where(storage.location)}"
        for storage in live[:12]
    ]
    if len(live) > 12:
        rest = sum(_aligned(s.partition_bytes) for s in live[12:])
        lines.append(f"  and {len(live) - 12} more: {rest} bytes")
    location = trace.ops[when].location
    return KernelError(
        f"SBUF of {config.name} holds {config.sbuf_bytes} bytes per partition, but the tiles that "
        f"are live together need {total(when)}:\n" + "\n".join(lines) + "\n"
        "Use smaller tiles, or load them nearer to their use.\n"
        f"  at {trace.where(location)}"
    )


def allocate_psum(trace):
    """Give every PSUM tile of the trace a bank of its own, least recently used first.

    Tiles share a bank only when all banks are taken.
    """
    config = trace.config
    bank_bytes = config.psum_bank_bytes
    storages = [s for s in trace.storages if s.buffer == "psum" and s.span is not None]
    users = [[] for _ in range(config.psum_banks)]  # live tiles
    freed = list(range(-config.psum_banks, 0))
    for clock, (kind, storage) in enumerate(_events(storages)):
        if kind == 1:
            bank = storage.address // bank_bytes
            users[bank].remove(storage)
            freed[bank] = clock
            continue
        order = sorted(range(config.psum_banks), key=lambda b: (bool(users[b]), freed[b]))
        for bank in order:
            offset = 0
            for other in sorted(users[bank], key=lambda s: s.address):
                start = other.address - bank * bank_bytes
                if start >= offset + storage.partition_bytes:
                    break
                offset = max(offset, start + other.partition_bytes)
            if offset + storage.partition_bytes <= bank_bytes:
                break
        else:
            live = [s for tiles in users for s in tiles]
            lines = "\n".join(
                f"  {s}: {s.partition_bytes} bytes, allocated at {trace.where(s.location)}"
                for s in live
            )
            when = trace.ops[storage.span[0]].location
            raise KernelError(
                f"PSUM of {config.name} has {config.psum_banks} banks of {bank_bytes} bytes per "
                f"partition; no room for {storage} ({storage.partition_bytes} bytes) beside\n"
                f"{lines}\nCopy results to SBUF before more are accumulated.\n"
                f"  at {trace.where(when)}"
            )
        storage.address = bank * bank_bytes + offset
        users[bank].append(storage)
