"""The tensor engine: a sequencer, the edges, the array, and PSUM below it.

The sequencer turns instructions into SBUF read commands, control for the edges and commands for PSUM.
It knows only time: operands and sums never pass through it, so that it can be simulated alone.
"""

from amaranth.hdl import C, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from ..arch.events import events_layout
from ..arch.formats import MATMUL_FORMATS
from ..arch.isa import AccessPattern, LoadStationary, MatmulMoving, UpdateMode
from ..interfaces import (
    SBUF_READ_CYCLES,
    PsumReadPort,
    SbufMovingPort,
    SbufWeightsPort,
    Update,
    issue_port,
    update_port,
)
from ..lib.delay import DELAY_LATENCY, DelayLine
from ..lib.replicate import Replicated
from ..lib.select import RoundRobin
from ..lib.stream import Queue, connect_streams
from ..memory.psum import PSUM_RAW_CYCLES, Psum, PsumCommand
from .array import ARRAY_CYCLES, EDGE_CYCLES, QUAD, ROW_SKEW, Array, Edge, EdgeControl

__all__ = ["MIN_INTERVAL", "Completion", "Pattern", "TensorEngine", "TensorSequencer", "Walker"]

MIN_INTERVAL = 6
"""Fewest cycles from one matmul's start to the next one's."""

_WORD_LOG2 = 4  # bytes of an SBUF word
_TAG_BITS = 3  # loads, and swaps, under way between dispatch and completion: at most four


def Pattern(address_bits, count_bits):
    """A decoded access pattern: ``address`` and ``steps`` in the same unit, modulo the memory."""
    return data.StructLayout(
        {
            "address": address_bits,
            "steps": data.ArrayLayout(address_bits, 4),
            "counts": data.ArrayLayout(count_bits, 4),
        }
    )


class Walker(wiring.Component):
    """The addresses of an access pattern, in order, innermost dimension fastest.

    Parameters
    ----------
    address_bits, count_bits : :class:`int`, bits

    Members
    -------
    load : :py:`In(1)`
        Start with ``pattern`` in the next cycle.
    pattern : :py:`In(Pattern(address_bits, count_bits))`
        Must not be empty.
    take : :py:`In(3)`
        Elements to go forward by (0: stay); at most ``remaining``.
    address : :py:`Out(address_bits)`
    step : :py:`Out(address_bits)`
        Of the innermost dimension.
    remaining : :py:`Out(count_bits)`
        Elements left in the innermost dimension, this one included.
    outer_last : :py:`Out(1)`
        Nothing follows after those.
    """

    def __init__(self, *, address_bits, count_bits):
        self.address_bits = address_bits
        self.count_bits = count_bits
        super().__init__(
            {
                "load": In(1),
                "pattern": In(Pattern(address_bits, count_bits)),
                "take": In(3),
                "address": Out(address_bits),
                "step": Out(address_bits),
                "remaining": Out(count_bits),
                "outer_last": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        width = self.address_bits
        pattern = Signal(self.pattern.shape())
        # bases[d]: where dimension d's present index begins, for d = 1..3; remaining: indices left.
        bases = [None, *(Signal(width, name=f"base{d}") for d in range(1, 4))]
        remaining = [
            self.remaining,
            *(Signal(self.count_bits, name=f"remaining{d}") for d in range(1, 4)),
        ]
        ends = [remaining[0] == self.take, *(remaining[d] == 1 for d in range(1, 4))]
        m.d.comb += [
            self.step.eq(pattern.steps[0]),
            self.outer_last.eq(ends[1] & ends[2] & ends[3]),
        ]

        with m.If(self.load):
            m.d.sync += [
                pattern.eq(self.pattern),
                self.address.eq(self.pattern.address),
                *(bases[d].eq(self.pattern.address) for d in range(1, 4)),
                *(remaining[d].eq(self.pattern.counts[d]) for d in range(4)),
            ]
        with m.Elif(self.take != 0):
            step = pattern.steps[0]
            forward = Signal(width)
            m.d.comb += forward.eq(
                Mux(self.take[0], step, 0)
                + Mux(self.take[1], step << 1, 0)
                + Mux(self.take[2], step << 2, 0)
            )
            with m.If(~ends[0]):
                m.d.sync += [
                    self.address.eq(self.address + forward),
                    remaining[0].eq(remaining[0] - self.take),
                ]
            # The lowest dimension that has not ended moves on; those below begin anew from there.
            below = ends[0]
            for d in range(1, 4):
                with m.If(below & ~ends[d]):
                    moved = Signal(width, name=f"moved{d}")
                    m.d.comb += moved.eq(bases[d] + pattern.steps[d])
                    m.d.sync += [
                        self.address.eq(moved),
                        *(bases[e].eq(moved) for e in range(1, d + 1)),
                        *(remaining[e].eq(pattern.counts[e]) for e in range(d)),
                        remaining[d].eq(remaining[d] - 1),
                    ]
                below = below & ends[d]
        return m


class Completion(wiring.Component):
    """Updates that wait, in order, for their work to be done.

    Parameters
    ----------
    depth : :class:`int`
        Updates that can wait.

    Members
    -------
    i : :py:`In(stream.Signature(Update))`
        At the start of each piece of work; mode NONE is swallowed when its turn comes.
    done : :py:`In(1)`
        The oldest piece of work that was not done is.
    o : :py:`Out(stream.Signature(Update))`
    empty : :py:`Out(1)`
        Nothing waits.

    Timing
    ------
    ``o.valid`` in the second cycle after ``done``.
    """

    def __init__(self, *, depth):
        self.depth = depth
        super().__init__(
            {
                "i": In(stream.Signature(Update)),
                "done": In(1),
                "o": Out(stream.Signature(Update)),
                "empty": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.waiting = waiting = Queue(shape=Update, depth=self.depth)
        connect_streams(m, self.i, waiting.i)

        done = Signal()
        finished = Signal(range(self.depth + 2))
        pop = Signal()
        wanted = Signal()
        m.d.comb += [
            wanted.eq(waiting.o.p.mode != UpdateMode.NONE),
            self.o.p.eq(waiting.o.p),
            self.o.valid.eq(waiting.o.valid & wanted & (finished != 0)),
            pop.eq(waiting.o.valid & (finished != 0) & (self.o.ready | ~wanted)),
            waiting.o.ready.eq(pop),
            self.empty.eq(waiting.level == 0),
        ]
        m.d.sync += done.eq(self.done)
        m.d.sync += finished.eq(finished + done - pop)
        return m


class TensorSequencer(wiring.Component):
    """Instructions in, commands to SBUF, edges and PSUM out.

    Two units work side by side, each with one instruction waiting behind the present one: one walks
    the pattern of a ``LoadStationary``, the other those of a ``MatmulMoving``. Instructions reach them in
    order. A load is held before its first element until the swap that it must follow; a matmul that
    follows a load is held until that load is complete.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    instructions : :py:`In(stream.Signature(Issue))`
        Opcodes other than MatmulMoving and LoadStationary complete at once and do nothing else.
    moving : :py:`Out(SbufMovingPort(config))`, without ``data``
    weights : :py:`Out(SbufWeightsPort(config))`, without ``data``
    control : :py:`Out(EdgeControl(config))`
        In the cycle in which SBUF's data can be sampled.
    psum : :py:`Out(PsumCommand(config))`
        As :class:`~..memory.psum.Psum` takes it.
    psum_busy_pe : :py:`Out(config.psum_banks)`
    psum_busy_dve : :py:`In(config.psum_banks)`
    update : :py:`Out(stream.Signature(Update))`
    starving : :py:`In(2)`
    busy : :py:`Out(1)`
    events : :py:`Out(events_layout("pe"))`

    Timing
    ------
    A matmul of N columns: an idle engine gives the first ``moving`` command 5 cycles after taking the
    instruction. Then one column per cycle. The next matmul's first column follows after exactly
    ``max(N, MIN_INTERVAL)`` cycles if its weights are complete. One cycle may be added when a DMA starves
    for a bank that the moving operand has been reading in every cycle.

    Within a wave, a column is held back only where it would accumulate onto one of the
    ``PSUM_RAW_CYCLES - 1`` columns before it (a ``dst`` that revisits an address at once).

    A load of M elements: commands in ``M / 4`` consecutive cycles if they are contiguous, start at a
    multiple of four elements and are not refused. The first may be in the cycle of the swap (one before
    the first column of the matmul before); the next matmul's first column is at the earliest three
    cycles after the last. So a load is hidden behind every matmul of ``N >= M / 4 + 1`` columns, plus one
    for each cycle in which SBUF refused.

    A column commanded in cycle ``t`` is in PSUM, for a vector engine that reads, in cycle
    ``t + drain_cycles``.
    """

    def __init__(self, *, config):
        self.config = config
        moving = SbufMovingPort(config).members
        weights = SbufWeightsPort(config).members
        super().__init__(
            {
                "instructions": issue_port(),
                "moving": Out(wiring.Signature({k: v for k, v in moving.items() if k != "data"})),
                "weights": Out(wiring.Signature({k: v for k, v in weights.items() if k != "data"})),
                "control": Out(EdgeControl(config)),
                "psum": Out(PsumCommand(config)),
                "psum_busy_pe": Out(config.psum_banks),
                "psum_busy_dve": In(config.psum_banks),
                "update": update_port(),
                "starving": In(2),
                "busy": Out(1),
                "events": Out(events_layout("pe")),
            }
        )

    @property
    def psum_cycles(self):
        """From a moving command to its PSUM command, which is one cycle ahead of the sums of quad 0."""
        above = ROW_SKEW * (self.config.rows - 1)
        return SBUF_READ_CYCLES + EDGE_CYCLES + above + ARRAY_CYCLES - 1

    @property
    def drain_cycles(self):
        """From a moving command to the cycle in which the vector engine may read the sums."""
        return self.psum_cycles + self.config.cols // QUAD + PSUM_RAW_CYCLES

    @property
    def waves(self):
        """Matmuls that can be on their way at once: as many as start while the first one drains."""
        return self.drain_cycles // MIN_INTERVAL + 4

    def elaborate(self, platform):
        m = Module()
        config = self.config
        address_bits, bank_bits, word_bits = (
            config.sbuf_addr_bits,
            config.psum_bank_bits,
            config.psum_word_bits,
        )
        moving_counts = config.psum_bank_words.bit_length()
        weights_counts = config.cols.bit_length()
        partitions = config.partition_bits + 1
        common = {
            "null": 1,
            "dtype": 4,
            "half": 2,
            "start": partitions,
            "stop": partitions,
        }
        load_layout = data.StructLayout(
            {**common, "src": Pattern(address_bits, weights_counts), "tag": _TAG_BITS}
        )
        matmul_layout = data.StructLayout(
            {
                **common,
                "update": Update,
                "src": Pattern(address_bits, moving_counts),
                "dst": Pattern(word_bits, moving_counts),
                "bank": bank_bits,
                "accumulate": 1,
                "columns": partitions,
                "passes": len(self.events.passes),
                "swap": 1,
                "tag": _TAG_BITS,
            }
        )

        # Dispatch: the head goes to its unit's waiting place ---------------------------------------

        head = Signal(
            data.StructLayout(
                {
                    "valid": 1,
                    "is_load": 1,
                    "is_matmul": 1,
                    "src": AccessPattern.layout(),
                    "dst": AccessPattern.layout(),
                    "half": 2,
                    "accumulate": 1,
                    "update": Update,
                }
            )
        )
        word = self.instructions.p.word
        as_load = data.View(LoadStationary.layout(), word)
        as_matmul = data.View(MatmulMoving.layout(), word)
        is_matmul = as_matmul.opcode == MatmulMoving.opcode
        dispatch = Signal()
        m.d.comb += self.instructions.ready.eq(~head.valid | dispatch)
        with m.If(self.instructions.ready):
            m.d.sync += [
                head.valid.eq(self.instructions.valid),
                head.is_load.eq(as_load.opcode == LoadStationary.opcode),
                head.is_matmul.eq(is_matmul),
                head.src.eq(Mux(is_matmul, as_matmul.src.as_value(), as_load.src.as_value())),
                head.dst.eq(as_matmul.dst),
                head.half.eq(Mux(is_matmul, as_matmul.half, as_load.half)),
                head.accumulate.eq(as_matmul.accumulate),
                head.update.semaphore.eq(as_load.update_semaphore),
                head.update.mode.eq(as_load.update_mode),
                head.update.value.eq(as_load.update_value),
            ]

        size_log2 = Signal(2)
        with m.Switch(head.src.dtype):
            for fmt in MATMUL_FORMATS:
                with m.Case(fmt.code):
                    m.d.comb += size_log2.eq(fmt.bytes.bit_length() - 1)
        null = Signal()
        m.d.comb += null.eq(
            ~(head.is_load | head.is_matmul)
            | _empty(head.src)
            | (head.is_matmul & _empty(head.dst))
        )
        source = {
            "null": null,
            "dtype": head.src.dtype,
            "half": head.half,
            "start": head.src.start_partition,
            "stop": head.src.start_partition + head.src.num_partitions,
        }
        loads_dispatched = Signal(_TAG_BITS)
        loads_done = Signal(_TAG_BITS)
        swaps_dispatched = Signal(_TAG_BITS)
        swaps_done = Signal(_TAG_BITS)
        fresh = Signal()  # a load was dispatched since the last matmul that swaps
        next_load = Signal(load_layout)
        next_load_valid = Signal()
        next_load_taken = Signal()
        next_matmul = Signal(matmul_layout)
        next_matmul_valid = Signal()
        next_matmul_seen = Signal()  # it has been in psum_busy_pe for a cycle
        start = Signal()

        m.submodules.load_updates = load_updates = Completion(depth=8)
        with m.If(next_load_taken):
            m.d.sync += next_load_valid.eq(0)
        with m.If(start):
            m.d.sync += next_matmul_valid.eq(0)
        m.d.sync += next_matmul_seen.eq(next_matmul_valid)
        m.d.comb += [
            dispatch.eq(
                head.valid
                & Mux(
                    head.is_matmul,
                    ~next_matmul_valid | start,
                    (~next_load_valid | next_load_taken) & load_updates.i.ready,
                )
            ),
            load_updates.i.valid.eq(dispatch & ~head.is_matmul),
            load_updates.i.p.eq(head.update),
        ]
        with m.If(dispatch & head.is_matmul):
            m.d.sync += [
                next_matmul_valid.eq(1),
                next_matmul_seen.eq(0),
                *(next_matmul[name].eq(value) for name, value in source.items()),
                *_decode(next_matmul.src, head.src, size_log2),
                *_decode(next_matmul.dst, head.dst, 0, word_log2=2),
                next_matmul.update.eq(head.update),
                next_matmul.bank.eq(head.dst.offset >> (word_bits + 2)),
                next_matmul.accumulate.eq(head.accumulate),
                next_matmul.columns.eq(head.dst.num_partitions),
                next_matmul.passes.eq(
                    head.src.num_partitions[:partitions] * head.dst.num_partitions[:partitions]
                ),
                next_matmul.swap.eq(fresh & ~null),
                next_matmul.tag.eq(loads_dispatched),
            ]
            with m.If(fresh & ~null):
                m.d.sync += [fresh.eq(0), swaps_dispatched.eq(swaps_dispatched + 1)]
        with m.If(dispatch & ~head.is_matmul):
            m.d.sync += [
                next_load_valid.eq(1),
                *(next_load[name].eq(value) for name, value in source.items()),
                *_decode(next_load.src, head.src, size_log2),
                next_load.tag.eq(swaps_dispatched),
                loads_dispatched.eq(loads_dispatched + 1),
            ]
            with m.If(~null):
                m.d.sync += fresh.eq(1)

        # Matmul: start -----------------------------------------------------------------------------

        wave = Signal(matmul_layout)
        wave_valid = Signal()
        first = Signal()
        go = Signal()
        last = Signal()
        hazard = Signal()
        interval = Signal(range(MIN_INTERVAL))
        yielded = Signal()

        m.submodules.src = src = Walker(address_bits=address_bits, count_bits=moving_counts)
        m.submodules.dst = dst = Walker(address_bits=word_bits, count_bits=moving_counts)
        m.submodules.updates = updates = Completion(depth=self.waves)

        slot_free = Signal()
        weights_ok = Signal()
        bank_ok = Signal()
        yields = Signal()
        can_start = Signal()
        m.d.comb += [
            slot_free.eq((~wave_valid | (go & last)) & next_matmul_valid),
            weights_ok.eq(~next_matmul.swap | (loads_done == next_matmul.tag)),
            bank_ok.eq(
                next_matmul.null
                | (next_matmul_seen & ~self.psum_busy_dve.bit_select(next_matmul.bank, 1))
            ),
            can_start.eq(slot_free & (interval == 0) & weights_ok & bank_ok & updates.i.ready),
            start.eq(can_start & ~yields),
            updates.i.valid.eq(start),
            updates.i.p.eq(next_matmul.update),
            src.load.eq(start),
            src.pattern.eq(next_matmul.src),
            dst.load.eq(start),
            dst.pattern.eq(next_matmul.dst),
        ]
        with m.If(interval != 0):
            m.d.sync += interval.eq(interval - 1)
        with m.If(start):
            m.d.sync += [
                wave.eq(next_matmul),
                wave_valid.eq(1),
                first.eq(1),
                interval.eq(MIN_INTERVAL - 1),
                yielded.eq(0),
                swaps_done.eq(swaps_done + next_matmul.swap),
            ]
        with m.Elif(go):
            m.d.sync += [wave_valid.eq(~last), first.eq(0)]
        with m.If(can_start & yields):
            m.d.sync += yielded.eq(1)

        # Matmul: one column per cycle --------------------------------------------------------------

        column = Signal()
        command = Signal(PsumCommand(config))
        before = Signal(PsumCommand(config))
        m.d.comb += [
            hazard.eq(
                wave.accumulate
                & ~wave.null
                & (_same(command, wave, dst) | _same(before, wave, dst))
            ),
            go.eq(wave_valid & ~hazard),
            column.eq(go & ~wave.null),
            last.eq(wave.null | (src.outer_last & (src.remaining == 1))),
            src.take.eq(column),
            dst.take.eq(column),
        ]
        # The swap is one cycle ahead of the first command: it needs no register behind the walkers.
        swap = Signal()
        done = Signal()
        moving_word = src.address[_WORD_LOG2:]
        moving_new = Signal()
        m.d.comb += moving_new.eq(column & (first | (moving_word != self.moving.word)))
        control = Signal(EdgeControl(config))
        m.d.sync += [
            swap.eq(start & next_matmul.swap),
            done.eq(go & last),
            self.moving.valid.eq(column),
            self.moving.new.eq(moving_new),
            command.valid.eq(column),
            before.eq(command),
        ]
        with m.If(column):
            m.d.sync += [
                self.moving.word.eq(moving_word),
                self.moving.offset.eq(src.address),
                *(
                    control.moving[name].eq(wave[name])
                    for name in ("dtype", "half", "start", "stop")
                ),
                command.accumulate.eq(wave.accumulate),
                command.bank.eq(wave.bank),
                command.word.eq(dst.address),
                command.columns.eq(wave.columns),
            ]

        # Load: beats of up to four weights ---------------------------------------------------------

        load = Signal(load_layout)
        load_valid = Signal()
        parity = Signal()  # tells the beats of two successive loads apart
        m.submodules.pattern = pattern = Walker(
            address_bits=address_bits, count_bits=weights_counts
        )
        beat_layout = data.StructLayout(
            {
                "valid": 1,
                "null": 1,
                "last": 1,
                "parity": 1,
                "tag": _TAG_BITS,
                "word": config.sbuf_word_bits,
                "offsets": data.ArrayLayout(_WORD_LOG2, QUAD),
                "weights": EdgeControl(config)["weights"].shape,
            }
        )
        beat = Signal(beat_layout)
        beat_taken = Signal()
        at_column = Signal(weights_counts)
        lane = at_column[:2]

        # Elements that follow in the same word, the same quad and the same innermost dimension.
        address = [pattern.address]
        fits = [C(1, 1)]
        for i in range(1, QUAD):
            address.append(Signal(address_bits, name=f"address{i}"))
            fits.append(Signal(name=f"fits{i}"))
            m.d.comb += [
                address[i].eq(pattern.address + pattern.step * i),
                fits[i].eq(
                    fits[i - 1]
                    & (pattern.remaining > i)
                    & (lane < QUAD - i)
                    & (address[i][_WORD_LOG2:] == pattern.address[_WORD_LOG2:])
                ),
            ]
        count = Signal(3)
        with m.If(fits[3]):
            m.d.comb += count.eq(4)
        with m.Elif(fits[2]):
            m.d.comb += count.eq(3)
        with m.Elif(fits[1]):
            m.d.comb += count.eq(2)
        with m.Else():
            m.d.comb += count.eq(1)

        m.d.comb += [
            beat.valid.eq(load_valid),
            beat.null.eq(load.null),
            beat.last.eq(load.null | (pattern.outer_last & (pattern.remaining == count))),
            beat.parity.eq(parity),
            beat.tag.eq(load.tag),
            beat.word.eq(pattern.address[_WORD_LOG2:]),
            *(beat.weights[name].eq(load[name]) for name in ("dtype", "half", "start", "stop")),
            beat.weights.quad.eq(at_column[2:]),
            pattern.take.eq(Mux(beat_taken & ~load.null, count, 0)),
            pattern.load.eq(next_load_taken),
            pattern.pattern.eq(next_load.src),
            next_load_taken.eq(next_load_valid & (~load_valid | (beat_taken & beat.last))),
        ]
        for target in range(QUAD):
            with m.Switch(lane):
                for begin in range(target + 1):
                    with m.Case(begin):
                        m.d.comb += [
                            beat.offsets[target].eq(address[target - begin]),
                            beat.weights.mask[target].eq(fits[target - begin]),
                        ]
        with m.If(next_load_taken):
            m.d.sync += [
                load.eq(next_load),
                load_valid.eq(1),
                parity.eq(~parity),
                at_column.eq(0),
            ]
        with m.Elif(beat_taken):
            m.d.sync += [load_valid.eq(~beat.last), at_column.eq(at_column + count)]

        # Two beats wait. Where the moving operand is about to take the bank that the first one needs,
        # the second may go first: otherwise a load of 4-byte elements, which reads a new word in every
        # cycle, would fall in step with the moving operand and lose a cycle to each of its words.
        waiting = [Signal(beat_layout, name=f"waiting{i}") for i in range(2)]
        output = Signal(beat_layout)
        allowed = Signal()
        accept = Signal()
        free = Signal()
        overtake = Signal()
        m.d.comb += [
            allowed.eq(output.tag == swaps_done),
            accept.eq(output.valid & allowed & (self.weights.ready | output.null)),
            free.eq(~output.valid | accept),
            self.weights.valid.eq(output.valid & allowed & ~output.null),
            self.weights.word.eq(output.word),
            self.weights.offsets.eq(output.offsets),
        ]

        def new(b):
            return (b.word != output.word) | (b.parity != output.parity)

        def collides(b):
            return moving_new & new(b) & (moving_word[0] == b.word[0])

        w0, w1 = waiting
        m.d.comb += [
            overtake.eq(
                w0.valid & w1.valid & (w0.parity == w1.parity) & collides(w0) & ~collides(w1)
            ),
            beat_taken.eq(load_valid & (~w0.valid | ~w1.valid | free)),
        ]
        with m.If(free & overtake):
            m.d.sync += [
                output.eq(w1),
                output.last.eq(0),
                self.weights.new.eq(new(w1)),
                w0.last.eq(w1.last),
                w1.eq(beat),
            ]
        with m.Elif(free):
            m.d.sync += [
                output.eq(w0),
                self.weights.new.eq(new(w0)),
                w0.eq(Mux(w1.valid, w1.as_value(), beat.as_value())),
                w1.eq(Mux(w1.valid, beat.as_value(), 0)),
            ]
        with m.Elif(~w0.valid):
            m.d.sync += w0.eq(beat)
        with m.Elif(~w1.valid):
            m.d.sync += w1.eq(beat)

        m.d.comb += load_updates.done.eq(accept & output.last)
        with m.If(accept & output.last):
            m.d.sync += loads_done.eq(loads_done + 1)

        # Control for the edges, with the data ------------------------------------------------------

        m.d.comb += [
            control.moving.valid.eq(self.moving.valid),
            control.swap.eq(swap),
            control.weights.eq(output.weights),
            control.weights.valid.eq(accept & ~output.null),
        ]
        stage = control
        for i in range(SBUF_READ_CYCLES):
            after = Signal(EdgeControl(config), name=f"control{i}")
            m.d.sync += after.eq(stage)
            stage = after
        m.d.comb += self.control.eq(stage)

        # Commands for PSUM, with the sums ----------------------------------------------------------

        m.submodules.drain = drain = DelayLine(
            members={"command": command.shape(), "done": 1},
            max_depth=self.psum_cycles - DELAY_LATENCY,
        )
        m.d.comb += [
            drain.depth.eq(self.psum_cycles - DELAY_LATENCY),
            drain.i.command.eq(command),
            drain.i.done.eq(done),
            self.psum.eq(drain.o.command),
        ]
        rippled = Signal(self.drain_cycles - self.psum_cycles)
        m.d.sync += rippled.eq(Cat(drain.o.done, rippled))
        m.d.comb += updates.done.eq(rippled[-1])

        # A bank is ours from the first sight of its matmul until the last sum has been written.
        busy_banks = []
        for b in range(config.psum_banks):
            left = Signal(range(self.drain_cycles + 1), name=f"bank{b}_left")
            ours = Signal(name=f"bank{b}_ours")
            wanted = Signal(name=f"bank{b}_wanted")
            m.d.comb += [
                ours.eq(wave_valid & ~wave.null & (wave.bank == b)),
                wanted.eq(next_matmul_valid & ~next_matmul.null & (next_matmul.bank == b)),
            ]
            with m.If(ours):
                m.d.sync += left.eq(self.drain_cycles)
            with m.Elif(left != 0):
                m.d.sync += left.eq(left - 1)
            m.d.sync += self.psum_busy_pe[b].eq(ours | wanted | (left != 0))
            busy_banks.append(left != 0)

        # A DMA that starves for a bank that the moving operand reads in every cycle gets one between
        # two waves.
        reads = Signal(2)
        reads_before = Signal(2)
        m.d.comb += [
            reads.eq(Cat(~self.moving.word[0], self.moving.word[0]) & self.moving.new.replicate(2)),
            yields.eq((self.starving & reads & reads_before).any() & ~yielded),
        ]
        m.d.sync += reads_before.eq(reads)

        # Updates -----------------------------------------------------------------------------------

        m.submodules.turns = turns = RoundRobin(count=2)
        sources = [load_updates.o, updates.o]
        take = Signal()
        m.d.comb += [
            take.eq(~self.update.valid | self.update.ready),
            turns.requests.eq(Cat(s.valid for s in sources)),
            turns.take.eq(take),
            *(s.ready.eq(take & turns.grant[i]) for i, s in enumerate(sources)),
        ]
        with m.If(take):
            m.d.sync += [
                self.update.valid.eq(turns.grant.any()),
                self.update.p.eq(
                    Mux(turns.grant[0], sources[0].p.as_value(), sources[1].p.as_value())
                ),
            ]

        # State and events --------------------------------------------------------------------------

        working = Signal()
        m.d.comb += [
            working.eq(
                load_valid
                | next_load_valid
                | w0.valid
                | output.valid
                | next_matmul_valid
                | wave_valid
                | Cat(busy_banks).any()
            ),
            self.busy.eq(
                working | head.valid | ~load_updates.empty | ~updates.empty | self.update.valid
            ),
        ]
        events = self.events
        ready = Signal()
        m.d.comb += ready.eq(slot_free & (interval == 0) & ~next_matmul.null)
        m.d.sync += [
            events.columns.eq(column),
            events.passes.eq(Mux(column, wave.passes, 0)),
            events.busy.eq(working),
            events.wait_weights.eq(ready & ~weights_ok),
            events.wait_psum.eq(ready & weights_ok & next_matmul_seen & ~bank_ok),
            events.wait_interval.eq((slot_free & (interval != 0)) | (wave_valid & hazard)),
            events.wait_sbuf.eq(self.weights.valid & ~self.weights.ready),
        ]
        return m


def _empty(pattern):
    """Whether an access pattern has no elements."""
    return Cat(*(pattern[f"count{d}"] == 0 for d in range(4)), pattern.num_partitions == 0).any()


def _decode(target, pattern, size_log2, *, word_log2=0):
    """Statements that fill a :func:`Pattern` from an access pattern of the instruction."""
    return [
        target.address.eq(pattern.offset >> word_log2),
        *(target.steps[d].eq(pattern[f"step{d}"] << size_log2) for d in range(4)),
        *(target.counts[d].eq(pattern[f"count{d}"]) for d in range(4)),
    ]


def _same(command, wave, dst):
    """Whether a command is for the sum that the wave writes next."""
    return command.valid & (command.bank == wave.bank) & (command.word == dst.address)


class TensorEngine(wiring.Component):
    """The tensor engine with its PSUM.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    instructions : :py:`In(stream.Signature(Issue))`
        Checked; see :class:`TensorSequencer`.
    moving : :py:`Out(SbufMovingPort(config))`
    weights : :py:`Out(SbufWeightsPort(config))`
    psum_read : :py:`In(PsumReadPort(config))`
        The vector engine's.
    psum_busy_pe : :py:`Out(config.psum_banks)`
        Banks in which a wave is, or is wanted next. Registered.
    psum_busy_dve : :py:`In(config.psum_banks)`
        Banks that the vector engine reads. Registered; it must not begin on a bank of ``psum_busy_pe``.
    update : :py:`Out(stream.Signature(Update))`
    starving : :py:`In(2)`
        SBUF banks for which a DMA starves.
    busy : :py:`Out(1)`
    events : :py:`Out(events_layout("pe"))`

    Attributes
    ----------
    psum : :class:`~..memory.psum.Psum`
        For test benches: ``psum.slices[p].banks[b][word]``.
    sequencer : :class:`TensorSequencer`

    Timing
    ------
    As :class:`TensorSequencer`. From the command of a moving column to its sum in PSUM:
    ``2 * rows + cols / 4 + 11`` cycles: SBUF 3, edge 4, moving register and PE 4, skew
    ``2 * (rows - 1) + cols / 4 - 1``, PSUM 3.
    """

    def __init__(self, *, config):
        self.config = config
        self.psum = Psum(config=config)
        self.sequencer = TensorSequencer(config=config)
        super().__init__(
            {
                "instructions": issue_port(),
                "moving": Out(SbufMovingPort(config)),
                "weights": Out(SbufWeightsPort(config)),
                "psum_read": In(PsumReadPort(config)),
                "psum_busy_pe": Out(config.psum_banks),
                "psum_busy_dve": In(config.psum_banks),
                "update": update_port(),
                "starving": In(2),
                "busy": Out(1),
                "events": Out(events_layout("pe")),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        m.submodules.sequencer = sequencer = self.sequencer
        m.submodules.array = array = Array(config=config)
        m.submodules.psum = psum = self.psum

        connect(m, flipped(self.instructions), sequencer.instructions)
        connect(m, sequencer.update, flipped(self.update))
        connect(m, flipped(self.psum_read), psum.read)
        for name in ("valid", "new", "word", "offset"):
            m.d.comb += getattr(self.moving, name).eq(getattr(sequencer.moving, name))
        for name in ("valid", "new", "word", "offsets"):
            m.d.comb += getattr(self.weights, name).eq(getattr(sequencer.weights, name))
        m.d.comb += [
            sequencer.weights.ready.eq(self.weights.ready),
            sequencer.psum_busy_dve.eq(self.psum_busy_dve),
            sequencer.starving.eq(self.starving),
            self.psum_busy_pe.eq(sequencer.psum_busy_pe),
            self.busy.eq(sequencer.busy),
            self.events.eq(sequencer.events),
            psum.command.eq(sequencer.psum),
            psum.sums.eq(array.sums),
        ]
        for p in range(config.partitions):
            edge = Edge(config=config)
            m.submodules[f"edge{p}"] = Replicated(edge, "edge")
            connect(m, edge.o, array.i[p])
            m.d.comb += [
                edge.index.eq(p),
                edge.control.eq(sequencer.control),
                edge.moving.eq(self.moving.data[p]),
                edge.weights.eq(self.weights.data[p]),
            ]
        return m
