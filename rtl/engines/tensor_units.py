"""The parts of the tensor engine's sequencer: pattern walkers, dispatcher, load unit, matmul unit.

Two counters keep loads and matmuls in order without a queue between them. A load carries the number
of swaps that come before it in the program, and gives no command until that many have been; a
matmul that swaps carries the number of loads before it, and does not start until that many are
complete.
"""

from amaranth.hdl import C, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from ..arch.formats import MATMUL_FORMATS
from ..arch.isa import AccessPattern, LoadStationary, MatmulMoving, UpdateMode
from ..interfaces import SbufMovingPort, SbufWeightsPort, Update, issue_port, update_port
from ..lib.stream import Queue, connect_streams
from ..memory.psum import PsumCommand
from .array import QUAD, EdgeControl

__all__ = [
    "MIN_INTERVAL", "WORD_LOG2", "Beats", "Completion", "Dispatcher", "LoadUnit", "LoadWork",
    "MatmulUnit", "MatmulWork", "Pattern", "Walker", "command_port",
]  # fmt: skip

MIN_INTERVAL = 6
"""Fewest cycles from one matmul's start to the next one's."""

WORD_LOG2 = 4
"""log2 of the bytes of an SBUF word."""

_TAG_BITS = 3  # a tag is compared with a counter that is less than eight behind


def command_port(port):
    """The part of an SBUF read port that carries commands: all but ``data``."""
    return wiring.Signature({name: m for name, m in port.members.items() if name != "data"})


def Pattern(address_bits, count_bits):
    """A decoded access pattern: ``address`` and ``steps`` in the same unit, modulo the memory."""
    return data.StructLayout(
        {
            "address": address_bits,
            "steps": data.ArrayLayout(address_bits, 4),
            "counts": data.ArrayLayout(count_bits, 4),
        }
    )


def _work(config):
    """Members that loads and matmuls share."""
    return {
        "null": 1,
        "update": Update,
        "tag": _TAG_BITS,
        "dtype": 4,
        "half": 2,
        "start": config.partition_bits + 1,
        "stop": config.partition_bits + 1,
    }


def LoadWork(config):
    """A decoded ``LoadStationary`` (stream payload).

    Members
    -------
    null : 1 bit
        Nothing to do but the update.
    update : :class:`~..interfaces.Update`
    tag : number of swaps before it in the program
    dtype, half, start, stop
        As in :func:`~.array.EdgeControl`.
    src : :func:`Pattern`, in bytes
    """
    src = Pattern(config.sbuf_addr_bits, config.cols.bit_length())
    return data.StructLayout({**_work(config), "src": src})


def MatmulWork(config):
    """A decoded ``MatmulMoving`` (stream payload).

    Members
    -------
    null, update, dtype, half, start, stop, src
        As in :func:`LoadWork`.
    swap : 1 bit
        A load came since the last matmul.
    tag : number of loads before it in the program
    dst : :func:`Pattern`, in words of the bank
    bank, accumulate, columns
        As in :func:`~..memory.psum.PsumCommand`.
    passes : multiplications per column
    """
    counts = config.psum_bank_words.bit_length()
    return data.StructLayout(
        {
            **_work(config),
            "swap": 1,
            "src": Pattern(config.sbuf_addr_bits, counts),
            "dst": Pattern(config.psum_word_bits, counts),
            "bank": config.psum_bank_bits,
            "accumulate": 1,
            "columns": config.partition_bits + 1,
            "passes": 2 * config.partition_bits + 1,
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


class Dispatcher(wiring.Component):
    """Decodes instructions and puts each in its unit's waiting place, in order.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    instructions : :py:`In(stream.Signature(Issue))`
    loads : :py:`Out(stream.Signature(LoadWork(config)))`
        Also what is neither a load nor a matmul, as ``null``.
    matmuls : :py:`Out(stream.Signature(MatmulWork(config)))`
    busy : :py:`Out(1)`

    Timing
    ------
    One instruction per cycle, valid two cycles after it was taken. Three are held at most: one in
    front of each unit and one that waits for its place.
    """

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "instructions": issue_port(),
                "loads": Out(stream.Signature(LoadWork(config))),
                "matmuls": Out(stream.Signature(MatmulWork(config))),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        loads, matmuls = self.loads, self.matmuls

        # Cycle 1: the fields in use.
        word = self.instructions.p.word
        as_load = data.View(LoadStationary.layout(), word)
        as_matmul = data.View(MatmulMoving.layout(), word)
        is_matmul = as_matmul.opcode == MatmulMoving.opcode
        valid = Signal()
        matmul = Signal()
        nothing = Signal()
        src = Signal(AccessPattern.layout())
        dst = Signal(AccessPattern.layout())
        half = Signal(2)
        accumulate = Signal()
        update = Signal(Update)
        dispatch = Signal()
        m.d.comb += self.instructions.ready.eq(~valid | dispatch)
        with m.If(self.instructions.ready):
            m.d.sync += [
                valid.eq(self.instructions.valid),
                matmul.eq(is_matmul),
                nothing.eq(~is_matmul & (as_load.opcode != LoadStationary.opcode)),
                src.eq(Mux(is_matmul, as_matmul.src.as_value(), as_load.src.as_value())),
                dst.eq(as_matmul.dst),
                half.eq(Mux(is_matmul, as_matmul.half, as_load.half)),
                accumulate.eq(as_matmul.accumulate),
                update.semaphore.eq(as_load.update_semaphore),
                update.mode.eq(as_load.update_mode),
                update.value.eq(as_load.update_value),
            ]

        # Cycle 2: the waiting places.
        size_log2 = Signal(2)
        with m.Switch(src.dtype):
            for fmt in MATMUL_FORMATS:
                with m.Case(fmt.code):
                    m.d.comb += size_log2.eq(fmt.bytes.bit_length() - 1)
        null = Signal()
        to_load = Signal()
        to_matmul = Signal()
        m.d.comb += [
            null.eq(nothing | _empty(src) | (matmul & _empty(dst))),
            to_load.eq(valid & ~matmul & (~loads.valid | loads.ready)),
            to_matmul.eq(valid & matmul & (~matmuls.valid | matmuls.ready)),
            dispatch.eq(to_load | to_matmul),
            self.busy.eq(valid | loads.valid | matmuls.valid),
        ]
        with m.If(loads.ready):
            m.d.sync += loads.valid.eq(0)
        with m.If(matmuls.ready):
            m.d.sync += matmuls.valid.eq(0)

        load_count = Signal(_TAG_BITS)
        swap_count = Signal(_TAG_BITS)
        fresh = Signal()  # a load that no matmul has followed yet
        common = {
            "null": null,
            "update": update,
            "dtype": src.dtype,
            "half": half,
            "start": src.start_partition,
            "stop": src.start_partition + src.num_partitions,
        }
        with m.If(to_load):
            m.d.sync += [
                loads.valid.eq(1),
                *(loads.p[name].eq(value) for name, value in common.items()),
                *_decode(loads.p.src, src, src.offset, size_log2),
                loads.p.tag.eq(swap_count),
                load_count.eq(load_count + 1),
                fresh.eq(fresh | ~null),
            ]
        with m.If(to_matmul):
            bits = self.config.partition_bits + 1
            swap = fresh & ~null
            m.d.sync += [
                matmuls.valid.eq(1),
                *(matmuls.p[name].eq(value) for name, value in common.items()),
                *_decode(matmuls.p.src, src, src.offset, size_log2),
                *_decode(matmuls.p.dst, dst, dst.offset >> 2, 0),
                matmuls.p.bank.eq(dst.offset >> (2 + self.config.psum_word_bits)),
                matmuls.p.accumulate.eq(accumulate),
                matmuls.p.columns.eq(dst.num_partitions),
                matmuls.p.passes.eq(src.num_partitions[:bits] * dst.num_partitions[:bits]),
                matmuls.p.swap.eq(swap),
                matmuls.p.tag.eq(load_count),
                swap_count.eq(swap_count + swap),
                fresh.eq(fresh & null),
            ]
        return m


def _empty(pattern):
    """Whether an access pattern has no elements."""
    return Cat(*(pattern[f"count{d}"] == 0 for d in range(4)), pattern.num_partitions == 0).any()


def _decode(target, pattern, address, size_log2):
    """Statements that fill a :func:`Pattern` from an access pattern of the instruction."""
    return [
        target.address.eq(address),
        *(target.steps[d].eq(pattern[f"step{d}"] << size_log2) for d in range(4)),
        *(target.counts[d].eq(pattern[f"count{d}"]) for d in range(4)),
    ]


def Beat(config):
    """Up to four weights that one read delivers (stream payload).

    Members
    -------
    null : 1 bit
        No weights: stands for a load that has none.
    last : 1 bit
        Completes its load.
    parity : 1 bit
        Differs between two successive loads.
    tag : of the load
    word, offsets : where they lie in SBUF
    weights : as in :func:`~.array.EdgeControl`
    """
    return data.StructLayout(
        {
            "null": 1,
            "last": 1,
            "parity": 1,
            "tag": _TAG_BITS,
            "word": config.sbuf_word_bits,
            "offsets": data.ArrayLayout(WORD_LOG2, QUAD),
            "weights": EdgeControl(config)["weights"].shape,
        }
    )


class Beats(wiring.Component):
    """Cuts loads into beats: elements that follow each other in one word and one quad of columns.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    i : :py:`In(stream.Signature(LoadWork(config)))`
    o : :py:`Out(stream.Signature(Beat(config)))`

    Timing
    ------
    One beat per cycle, the first one cycle after a load was taken; no gap between loads. Contiguous
    elements from a multiple of four: four per beat.
    """

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "i": In(stream.Signature(LoadWork(config))),
                "o": Out(stream.Signature(Beat(config))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config, beat = self.config, self.o.p
        m.submodules.walker = walker = Walker(
            address_bits=config.sbuf_addr_bits, count_bits=config.cols.bit_length()
        )
        load = Signal(LoadWork(config))
        parity = Signal()
        column = Signal(config.cols.bit_length())
        lane = column[:2]

        # fits[i]: element i from here on is in this beat. A quad ends after lane 3.
        address = [walker.address]
        fits = [C(1, 1)]
        for i in range(1, QUAD):
            address.append(Signal(config.sbuf_addr_bits, name=f"address{i}"))
            fits.append(Signal(name=f"fits{i}"))
            m.d.comb += [
                address[i].eq(walker.address + walker.step * i),
                fits[i].eq(
                    fits[i - 1]
                    & (walker.remaining > i)
                    & (lane < QUAD - i)
                    & (address[i][WORD_LOG2:] == walker.address[WORD_LOG2:])
                ),
            ]
        count = Signal(3)
        m.d.comb += count.eq(sum(fits))
        for target in range(QUAD):
            with m.Switch(lane):
                for begin in range(target + 1):
                    with m.Case(begin):
                        m.d.comb += [
                            beat.offsets[target].eq(address[target - begin]),
                            beat.weights.mask[target].eq(fits[target - begin]),
                        ]

        taken = Signal()
        m.d.comb += [
            beat.null.eq(load.null),
            beat.last.eq(load.null | (walker.outer_last & (walker.remaining == count))),
            beat.parity.eq(parity),
            beat.tag.eq(load.tag),
            beat.word.eq(walker.address[WORD_LOG2:]),
            beat.weights.valid.eq(~load.null),
            beat.weights.quad.eq(column[2:]),
            *(beat.weights[name].eq(load[name]) for name in ("dtype", "half", "start", "stop")),
            taken.eq(self.o.valid & self.o.ready),
            self.i.ready.eq(~self.o.valid | (taken & beat.last)),
            walker.load.eq(self.i.valid & self.i.ready),
            walker.pattern.eq(self.i.p.src),
            walker.take.eq(Mux(taken & ~load.null, count, 0)),
        ]
        with m.If(self.i.ready):
            m.d.sync += [
                self.o.valid.eq(self.i.valid),
                load.eq(self.i.p),
                parity.eq(parity ^ self.i.valid),
                column.eq(0),
            ]
        with m.Elif(taken):
            m.d.sync += column.eq(column + count)
        return m


class LoadUnit(wiring.Component):
    """Reads weights: loads in, SBUF commands and what the edges must know out.

    A command may be refused. Where the moving operand is about to take the bank that the next beat
    needs, the one after it goes first: otherwise a load of 4-byte elements, which reads a new word
    in every cycle, would fall in step with a moving operand of 4-byte elements and lose a cycle to
    each of its words.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    loads : :py:`In(stream.Signature(LoadWork(config)))`
    port : :py:`Out(command_port(SbufWeightsPort(config)))`
    weights : :py:`Out(EdgeControl(config)["weights"])`
        About the command of the same cycle; ``valid`` if it was taken.
    swaps : :py:`In(3)`
        Swaps so far, modulo 8.
    done : :py:`Out(3)`
        Loads completed, modulo 8.
    moving_next, moving_bank : :py:`In(1)`
        The moving operand reads that bank in the next cycle.
    update : :py:`Out(stream.Signature(Update))`
    busy : :py:`Out(1)`

    Timing
    ------
    First command three cycles after the load was taken, if its swap has been; then one per cycle
    unless refused. ``done`` counts in the cycle after the last command was taken; the update
    follows two cycles later.
    """

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "loads": In(stream.Signature(LoadWork(config))),
                "port": Out(command_port(SbufWeightsPort(config))),
                "weights": Out(EdgeControl(config)["weights"].shape),
                "swaps": In(_TAG_BITS),
                "done": Out(_TAG_BITS),
                "moving_next": In(1),
                "moving_bank": In(1),
                "update": update_port(),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        m.submodules.beats = beats = Beats(config=config)
        m.submodules.updates = updates = Completion(depth=8)
        m.d.comb += [
            beats.i.p.eq(self.loads.p),
            beats.i.valid.eq(self.loads.valid & updates.i.ready),
            self.loads.ready.eq(beats.i.ready & updates.i.ready),
            updates.i.p.eq(self.loads.p.update),
            updates.i.valid.eq(self.loads.valid & beats.i.ready),
        ]
        connect(m, updates.o, flipped(self.update))

        output = Signal(Beat(config))
        output_valid = Signal()
        waiting = [Signal(Beat(config), name=f"waiting{i}") for i in range(2)]
        waiting_valid = [Signal(name=f"waiting{i}_valid") for i in range(2)]
        allowed = Signal()
        taken = Signal()
        free = Signal()
        m.d.comb += [
            allowed.eq(output_valid & (output.tag == self.swaps)),
            taken.eq(allowed & (self.port.ready | output.null)),
            free.eq(~output_valid | taken),
            self.port.valid.eq(allowed & ~output.null),
            self.port.word.eq(output.word),
            self.port.offsets.eq(output.offsets),
            self.weights.eq(output.weights),
            self.weights.valid.eq(taken & ~output.null),
        ]

        # The word read last is the one in the output register: it is taken before the next comes.
        def new(beat):
            return (beat.word != output.word) | (beat.parity != output.parity)

        def collides(beat):
            return self.moving_next & new(beat) & (beat.word[0] == self.moving_bank)

        first, second = waiting
        overtake = Signal()
        m.d.comb += [
            overtake.eq(
                waiting_valid[1]
                & (first.parity == second.parity)
                & collides(first)
                & ~collides(second)
            ),
            beats.o.ready.eq(free | ~waiting_valid[0] | ~waiting_valid[1]),
        ]
        with m.If(free & overtake):
            # The one that stays behind completes the load.
            m.d.sync += [
                output_valid.eq(1),
                output.eq(second),
                output.last.eq(0),
                first.last.eq(second.last),
                second.eq(beats.o.p),
                waiting_valid[1].eq(beats.o.valid),
                self.port.new.eq(new(second)),
            ]
        with m.Elif(free):
            m.d.sync += [
                output_valid.eq(waiting_valid[0]),
                waiting_valid[0].eq(waiting_valid[1] | beats.o.valid),
                waiting_valid[1].eq(waiting_valid[1] & beats.o.valid),
                first.eq(Mux(waiting_valid[1], second.as_value(), beats.o.p.as_value())),
                second.eq(beats.o.p),
            ]
            with m.If(waiting_valid[0]):
                m.d.sync += [output.eq(first), self.port.new.eq(new(first))]
        with m.Elif(~waiting_valid[0]):
            m.d.sync += [first.eq(beats.o.p), waiting_valid[0].eq(beats.o.valid)]
        with m.Elif(~waiting_valid[1]):
            m.d.sync += [second.eq(beats.o.p), waiting_valid[1].eq(beats.o.valid)]

        m.d.comb += [
            updates.done.eq(taken & output.last),
            self.busy.eq(~updates.empty),
        ]
        with m.If(taken & output.last):
            m.d.sync += self.done.eq(self.done + 1)
        return m


class MatmulUnit(wiring.Component):
    """Streams moving operands: matmuls in, SBUF commands, PSUM commands and swaps out.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`
    waves : :class:`int`
        Matmuls that can have started and not be done.

    Members
    -------
    matmuls : :py:`In(stream.Signature(MatmulWork(config)))`
    port : :py:`Out(command_port(SbufMovingPort(config)))`
    moving : :py:`Out(EdgeControl(config)["moving"])`
        About the command of the same cycle.
    psum : :py:`Out(PsumCommand(config))`
        For the column of the command of the same cycle.
    last : :py:`Out(1)`
        A matmul ends with it.
    swap : :py:`Out(1)`
        The next cycle's command is the first of a matmul with new weights.
    swaps : :py:`Out(3)`
        Swaps so far, modulo 8: counts in the cycle of ``swap``.
    loads : :py:`In(3)`
        Loads completed, modulo 8.
    moving_next, moving_bank : :py:`Out(1)`
        As in :class:`LoadUnit`.
    done : :py:`In(1)`
        The oldest matmul that is not done is.
    psum_busy_others : :py:`In(config.psum_banks)`
    banks : :py:`Out(config.psum_banks)`
        Banks of the waiting and of the present matmul. Registered.
    starving : :py:`In(2)`
    update : :py:`Out(stream.Signature(Update))`
    busy : :py:`Out(1)`
        A matmul is present, or waits for its update.
    events : :py:`Out`
        ``columns``, ``passes``, ``wait_weights``, ``wait_psum``, ``wait_interval`` of the events.

    Timing
    ------
    First command three cycles after the matmul became valid; see :class:`~.tensor.TensorSequencer`.
    """

    def __init__(self, *, config, waves):
        self.config = config
        self.waves = waves
        super().__init__(
            {
                "matmuls": In(stream.Signature(MatmulWork(config))),
                "port": Out(command_port(SbufMovingPort(config))),
                "moving": Out(EdgeControl(config)["moving"].shape),
                "psum": Out(PsumCommand(config)),
                "last": Out(1),
                "swap": Out(1),
                "swaps": Out(_TAG_BITS),
                "loads": In(_TAG_BITS),
                "moving_next": Out(1),
                "moving_bank": Out(1),
                "done": In(1),
                "psum_busy_others": In(config.psum_banks),
                "banks": Out(config.psum_banks),
                "starving": In(2),
                "update": update_port(),
                "busy": Out(1),
                "events": Out(
                    data.StructLayout(
                        {
                            "columns": 1,
                            "passes": 2 * config.partition_bits + 1,
                            "wait_weights": 1,
                            "wait_psum": 1,
                            "wait_interval": 1,
                        }
                    )
                ),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        counts = config.psum_bank_words.bit_length()
        m.submodules.src = src = Walker(address_bits=config.sbuf_addr_bits, count_bits=counts)
        m.submodules.dst = dst = Walker(address_bits=config.psum_word_bits, count_bits=counts)
        m.submodules.updates = updates = Completion(depth=self.waves)
        connect(m, updates.o, flipped(self.update))

        wave = Signal(MatmulWork(config))
        wave_valid = Signal()
        go = Signal()  # the wave moves on
        last = Signal()  # and ends
        hazard = Signal()
        start = Signal()
        self._start(m, start, updates, wave_valid & ~(go & last), hazard)
        m.d.comb += [
            src.load.eq(start),
            src.pattern.eq(self.matmuls.p.src),
            dst.load.eq(start),
            dst.pattern.eq(self.matmuls.p.dst),
        ]

        # A wave without elements lasts one cycle, in which it commands nothing.
        first = Signal()
        column = Signal()
        before = Signal(PsumCommand(config))
        m.d.comb += [
            hazard.eq(
                wave_valid
                & ~wave.null
                & wave.accumulate
                & (_same(self.psum, wave, dst) | _same(before, wave, dst))
            ),
            go.eq(wave_valid & ~hazard),
            column.eq(go & ~wave.null),
            last.eq(wave.null | (src.outer_last & (src.remaining == 1))),
            src.take.eq(column),
            dst.take.eq(column),
        ]
        with m.If(start):
            m.d.sync += [wave.eq(self.matmuls.p), wave_valid.eq(1), first.eq(1)]
        with m.Elif(go):
            m.d.sync += [wave_valid.eq(~last), first.eq(0)]

        word = src.address[WORD_LOG2:]
        m.d.comb += [
            self.moving_next.eq(column & (first | (word != self.port.word))),
            self.moving_bank.eq(word[0]),
        ]
        m.d.sync += [
            self.port.valid.eq(column),
            self.port.new.eq(self.moving_next),
            self.moving.valid.eq(column),
            self.psum.valid.eq(column),
            self.last.eq(go & last),
            before.eq(self.psum),
        ]
        with m.If(column):
            m.d.sync += [
                self.port.word.eq(word),
                self.port.offset.eq(src.address),
                *(self.moving[n].eq(wave[n]) for n in ("dtype", "half", "start", "stop")),
                *(self.psum[n].eq(wave[n]) for n in ("accumulate", "bank", "columns")),
                self.psum.word.eq(dst.address),
            ]

        banks = Signal(config.psum_banks)
        for b in range(config.psum_banks):
            waits = self.matmuls.valid & ~self.matmuls.p.null & (self.matmuls.p.bank == b)
            m.d.comb += banks[b].eq(waits | (wave_valid & ~wave.null & (wave.bank == b)))
        m.d.sync += self.banks.eq(banks)
        m.d.comb += [
            self.busy.eq(wave_valid | ~updates.empty),
            updates.done.eq(self.done),
            self.events.columns.eq(column),
            self.events.passes.eq(Mux(column, wave.passes, 0)),
        ]
        return m

    def _start(self, m, start, updates, occupied, hazard):
        """When the waiting matmul starts: drives ``start``, takes it, counts and tells its swap."""
        work = self.matmuls.p
        # psum_busy_pe must show the bank first: the others decide in the same cycle as we.
        seen = Signal()
        interval = Signal(range(MIN_INTERVAL))  # cycles that the next start must still wait
        yielded = Signal()
        turn, weights_ok, bank_ok, ready, yields = (
            Signal(name=name) for name in ("turn", "weights_ok", "bank_ok", "ready", "yields")
        )
        m.d.comb += [
            turn.eq(self.matmuls.valid & ~occupied),
            weights_ok.eq(~work.swap | (self.loads == work.tag)),
            bank_ok.eq(work.null | (seen & ~self.psum_busy_others.bit_select(work.bank, 1))),
            ready.eq(turn & (interval == 0) & weights_ok & bank_ok & updates.i.ready),
            start.eq(ready & ~yields),
            self.matmuls.ready.eq(start),
            updates.i.valid.eq(start),
            updates.i.p.eq(work.update),
        ]
        m.d.sync += [
            seen.eq(self.matmuls.valid & ~start),
            self.swap.eq(start & work.swap),
            yielded.eq(ready & yields),
        ]
        with m.If(start):
            m.d.sync += [
                self.swaps.eq(self.swaps + work.swap),
                interval.eq(MIN_INTERVAL - 1),
            ]
        with m.Elif(interval != 0):
            m.d.sync += interval.eq(interval - 1)

        # A DMA that starves for a bank that the moving operand reads in every cycle gets it once.
        reads = Signal(2)
        reads_before = Signal(2)
        bank = self.port.word[0]
        m.d.comb += [
            reads.eq(Mux(self.port.new, Cat(~bank, bank), 0)),
            yields.eq((self.starving & reads & reads_before).any() & ~yielded),
        ]
        m.d.sync += reads_before.eq(reads)

        m.d.comb += [
            self.events.wait_weights.eq(turn & (interval == 0) & ~weights_ok),
            self.events.wait_psum.eq(turn & (interval == 0) & weights_ok & seen & ~bank_ok),
            self.events.wait_interval.eq((turn & (interval != 0)) | hazard),
        ]


def _same(command, wave, dst):
    """Whether a command is for the sum that the wave writes next."""
    return command.valid & (command.bank == wave.bank) & (command.word == dst.address)
