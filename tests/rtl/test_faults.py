"""Planted faults: of one line of the hardware changed at a time, a shipped test must take notice.

Every fault names the test that must fail, which passes without it. What came through once has left
a test of that behaviour where the part is tested. The first fault of every module is a quick one.
"""

from collections import Counter
from pathlib import Path

import pytest

from .jury import Fault, Jury

LIB = [
    Fault("lib.delay:DelayLine.elaborate", "what is old comes out after a reset",
          " & fresh.replicate(width)", "",
          "lib/test_delay.py::test_what_was_taken_before_a_reset_never_comes_out[9]"),
    Fault("lib.delay:DelayLine.elaborate", "a cycle too long", "write - 1 - self.depth",
          "write - 2 - self.depth", "lib/test_delay.py::test_every_depth[1]"),
    Fault("lib.delay:DelayLine.elaborate", "the first word is lost", "age > self.depth",
          "age > self.depth + 1", "lib/test_delay.py::test_every_depth[1]"),
    Fault("lib.select:RoundRobin.elaborate", "hold is ignored", "m.If(self.hold)",
          "m.If(self.hold & 0)", "lib/test_select.py"),
    Fault("lib.select:RoundRobin.elaborate", "the turn never passes",
          "mask.eq(after | (~after.any()).replicate(n))", "mask.eq(mask)", "lib/test_select.py"),
    Fault("lib.select:RoundRobin.elaborate", "the turn passes without being used",
          "self.take & self.grant.any()", "self.grant.any()", "lib/test_select.py"),
    Fault("lib.select:RoundRobin.elaborate", "requests before the turn are not granted",
          " | lowest_one(self.requests) & ~ahead.any().replicate(n)", "", "lib/test_select.py"),
    Fault("lib.select:lowest_one", "all requests are granted", "(value & (~value + 1))[:width]",
          "value[:width]", "lib/test_select.py"),
    Fault("lib.stream:Queue.elaborate", "takes what does not fit", "eq(fifo.w_rdy)", "eq(1)",
          "lib/test_stream.py"),
    Fault("lib.stream:Queue.elaborate", "level is always zero", "eq(fifo.level)", "eq(0)",
          "lib/test_stream.py"),
    Fault("lib.stream:Queue.elaborate", "does not wait for its consumer", "eq(self.o.ready)",
          "eq(1)", "lib/test_stream.py"),
    Fault("lib.stream:connect_streams", "no back-pressure", "source.ready.eq(sink.ready)",
          "source.ready.eq(1)", "lib/test_stream.py"),
    Fault("lib.stream:connect_streams", "payloads are not compared", "shapes[0] != shapes[1]",
          "False", "lib/test_stream.py"),
    Fault("lib.replicate:Library.add", "one name for two components", "self._keys[name] != key",
          "False", "lib/test_replicate.py::test_a_name_stands_for_one_component"),
    Fault("lib.replicate:Replicated.elaborate", "every instance is a definition",
          "if not isinstance(platform, Library)", "if True",
          "memory/test_psum.py::test_export_defines_one_slice[SMALL]"),
    Fault("lib.axi:_write_members", "length of a burst cut off", '"awlen": Out(8)',
          '"awlen": Out(4)', "engines/test_dma_hbm.py::"
          "test_write_bursts_have_their_addresses_strobes_and_answers"),
]  # fmt: skip

FMA, OPERAND = "arith.fma:", "arith.operand:OperandConverter.elaborate"
CAST_IN, CAST_OUT = "arith.convert:CastIn.elaborate", "arith.convert:CastOut.elaborate"
ELEMENT = "engines/test_array.py::test_an_element_multiplies_and_adds_exactly"
LANE_TEST = "engines/test_vector_parts.py::test_a_lane_takes_its_source_and_casts_it"
ELEMENTS = "arith/test_operand.py::test_a_few_elements_of_every_kind"

ARITH = [
    Fault(FMA + "_Binary32.__init__", "infinity is an exponent like others", "Cat(C(0, 7), top)",
          "0", ELEMENT),
    Fault(FMA + "product", "void ignored", "is_void.eq(kind == Kind.VOID)", "is_void.eq(0)",
          ELEMENT),
    Fault(FMA + "product", "sign of the weight ignored", "x.sign ^ w.sign", "x.sign", ELEMENT),
    Fault(FMA + "product", "infinity times zero is a number", " | (inf & ~number)", "", ELEMENT),
    Fault(FMA + "align_add", "sticky bit lost", "kept | (lost != 0)", "kept", ELEMENT),
    Fault(FMA + "align_add", "infinities do not cancel to NaN",
          " | (term.inf & c.inf & opposite)", "", ELEMENT),
    Fault(FMA + "align_add", "far terms are not shifted out", "distance > 31, 31, distance",
          "distance > 31, 0, distance", ELEMENT),
    Fault(FMA + "round_sum", "rounding dropped", "mag + mag[drop] + ((1 << (drop - 1)) - 1)",
          "mag", ELEMENT),
    Fault(FMA + "round_sum", "ties not to even", "mag + mag[drop] +", "mag + 1 +", ELEMENT),
    Fault(FMA + "round_sum", "canonical NaN wrong", "CANONICAL_NAN", "0x7FC00001", ELEMENT),
    Fault(FMA + "round_sum", "overflow wraps",
          "Mux(packed >= 0x7F800000, 0x7F800000, packed)", "packed", ELEMENT),
    Fault(FMA + "round_sum", "subnormals not shifted back", "Mux(left[-1], -left, 0)", "0",
          ELEMENT),
    Fault(FMA + "addend", "sign of the addend lost", "result.sign.eq(fields.sign)",
          "result.sign.eq(0)", "memory/test_psum.py::test_random_traffic"),
    Fault(FMA + "Fma.elaborate", "squares x", "product(m, self.x, self.w)",
          "product(m, self.x, self.x)", "arith/test_fma.py::test_latency_and_throughput"),
    Fault(FMA + "Add.elaborate", "adds a to itself", "addend(m, self.a), self.b",
          "addend(m, self.a), self.a", "arith/test_fma.py::test_latency_and_throughput"),
    Fault(OPERAND, "subnormals not normalised", "exp - zeros", "exp", ELEMENTS),
    Fault(OPERAND, "valid ignored", "~self.valid | ~known", "~known", ELEMENTS),
    Fault(OPERAND, "exponent of a subnormal too small", "Mux(field.any(), field, 1)", "field",
          ELEMENTS),
    Fault(OPERAND, "NaN is infinity", "Mux(nan, Kind.NAN, Kind.INF)", "Kind.INF", ELEMENTS),
    Fault(OPERAND, "low half not twelve bits lower", "Mux(low, 12, 0)", "Mux(low, 11, 0)",
          ELEMENTS),
    Fault("arith.operand:round_tf32", "ties not to even", "bits[13] + 0xFFF", "0x1000", ELEMENTS),
    Fault(CAST_OUT, "NaN is not zero as an integer", "Mux(s1_nan, 0, mag)", "mag", LANE_TEST),
    Fault(CAST_IN, "sign of an integer ignored", "sign.eq(code[-1])", "sign.eq(0)", LANE_TEST),
    Fault(CAST_IN, "wide integers truncated", "mag + mag[8] + 0x7F", "mag", LANE_TEST),
    Fault(CAST_IN, "NaN as it came", "Mux(s1_nan, CANONICAL_NAN, Mux(s1_ready, s1_word, packed))",
          "Mux(s1_ready, s1_word, packed)", LANE_TEST),
    Fault(CAST_OUT, "saturate ignored", "Mux(s1_saturate, last, last + 1)", "last + 1", LANE_TEST),
    Fault(CAST_OUT, "sticky bit lost", "kept[2] | kept[0] | (lost != 0)", "kept[2] | kept[0]",
          LANE_TEST),
    Fault(CAST_OUT, "integers wrap", "s1_huge | (count > most)", "s1_huge", LANE_TEST),
]  # fmt: skip

SLICE, PSUM = "memory.psum:PsumSlice.elaborate", "memory.psum:Psum.elaborate"
SBUF_SLICE, GROUP = "memory.sbuf:SbufSlice.elaborate", "memory.sbuf:SbufGroup."
SBUF = "memory.sbuf:Sbuf."
TRAFFIC = "memory/test_psum.py::test_random_traffic"
MIXED = "memory/test_sbuf.py::test_mixed_patterns_match_a_byte_array"

MEMORY = [
    Fault(SLICE, "minus zero lost on overwriting", "_IDENTITY", "0",
          "memory/test_psum.py::test_overwriting_is_exact_whatever_was_there"),
    Fault(SLICE, "accumulate dropped", "s1_accumulate.eq(command.accumulate)",
          "s1_accumulate.eq(0)", TRAFFIC),
    Fault(SLICE, "wrong bank bit", "(s2_where.bank == b)", "((s2_where.bank ^ 1) == b)", TRAFFIC),
    Fault(SLICE, "wrong word bit", "writer.addr.eq(s2_where.word)",
          "writer.addr.eq(s2_where.word & ~1)", TRAFFIC),
    Fault(SLICE, "partition mask off by one", "self.index < command.columns",
          "self.index <= command.columns", TRAFFIC),
    Fault(SLICE, "a reset keeps a valid flag", "s1_valid, s2_valid = Signal(), Signal()",
          "s1_valid, s2_valid = Signal(reset_less=True), Signal(reset_less=True)",
          "memory/test_psum.py::test_nothing_is_written_after_a_reset"),
    Fault(SLICE, "read and command swapped", "Mux(here, command.word, read.word)",
          "Mux(here, read.word, command.word)", TRAFFIC),
    Fault(SLICE, "old value not read", "here | (read.valid & (read.bank == b))",
          "read.valid & (read.bank == b)", TRAFFIC),
    Fault(PSUM, "commands do not ripple", "            command = here\n", "", TRAFFIC),
    Fault(PSUM, "partitions swapped", "part.index.eq(p)", "part.index.eq(p ^ 1)", TRAFFIC),
    Fault(SBUF_SLICE, "two bytes read in the wrong half", "Mux(offset[1], word[16:32], word)",
          "word", MIXED),
    Fault(SBUF_SLICE, "the word is not held", "hold.eq(word)", "hold.eq(reads[0])", MIXED),
    Fault(SBUF_SLICE, "strobes outlive their commit",
          "Mux(self.commit[0] | self.commit[1], 0, strobe)", "strobe", MIXED),
    Fault(SBUF_SLICE, "bytes that were not gathered are written", "Mux(self.commit[b], strobe,",
          "Mux(self.commit[b], 0xFFFF,", MIXED),
    Fault(SBUF_SLICE, "a beat of DMA in half of the word", "self.dma_data.replicate(2)",
          "self.dma_data", MIXED),
    Fault(GROUP + "_writes", "row of the vector engine ignored",
          "Mux(self.commit[b], self.commit_row, row)", "row", MIXED),
    Fault(GROUP + "_writes", "beats across reach all partitions", "reach.eq(slot[1:] == j // 2)",
          "reach.eq(1)", MIXED),
    Fault(GROUP + "_reads", "row of the engines ignored",
          "Mux(self.engine_read[b], self.engine_row[b], beat.offset[5:])", "beat.offset[5:]",
          MIXED),
    Fault(GROUP + "_reads", "answer a cycle early", "self.read_done.eq(done[-1])",
          "self.read_done.eq(done[-2])", MIXED),
    Fault(SBUF + "_engine_reads", "weights do not wait for moving", "busy[b] | read_yield[b]",
          "read_yield[b]", MIXED),
    Fault(SBUF + "_engine_reads", "readers do not yield to starving DMA",
          "busy[b] | read_yield[b]", "busy[b]",
          "memory/test_sbuf.py::test_dma_reads_wait_a_bounded_time_for_weights_and_vector"),
    Fault(SBUF + "_engine_reads", "a word that is held is read again",
          "port.valid & port.new & (bank == b)", "port.valid & (bank == b)",
          "memory/test_sbuf.py::test_a_word_that_is_held_leaves_its_bank_to_dma"),
    Fault(SBUF + "_vector_writes", "both banks committed", " & (port.word[0] == b)", "", MIXED),
    Fault(SBUF + "_vector_writes", "valid ignored", "Mux(port.valid, port.mask, 0)", "port.mask",
          MIXED),
    Fault(SBUF + "_dma", "arbiter without turn", "turn.take.eq(1)", "turn.take.eq(0)",
          "memory/test_sbuf.py::test_two_engines_share_a_group_fairly"),
    Fault(SBUF + "_dma", "turns outlive the requests", "ResetInserter(~wanted.any())(turn)", "turn",
          "memory/test_sbuf.py::test_a_group_that_nobody_wanted_serves_the_first_engine_first"),
    Fault(SBUF + "_dma", "starving beats do not go first", "Mux(urgent.any(), urgent, able)",
          "able", "memory/test_sbuf.py::test_an_engine_whose_bank_is_rarely_free_gets_its_turn"),
    Fault(SBUF + "_dma", "beats meet the engines in a bank", "able.eq(wanted & free)",
          "able.eq(wanted)", MIXED),
    Fault(SBUF + "_dma", "patience is not restored", "~beat.valid | beat.ready", "~beat.valid",
          "memory/test_sbuf.py::test_dma_reads_wait_a_bounded_time_for_weights_and_vector"),
    Fault(SBUF + "_dma", "starving writes are not shown",
          'starving["read"] | starving["write"]', 'starving["read"]',
          "memory/test_sbuf.py::test_dma_writes_raise_starving_until_they_are_taken"),
    Fault(SBUF + "_hold", "engines take turns in a group", "turn.hold.eq(beat.across",
          "turn.hold.eq(0 & beat.across",
          "memory/test_sbuf.py::test_engines_that_go_across_together_get_out_of_each_others_way"),
    Fault(SBUF + "_hold", "what was held outlives the requests", "with m.If(~wanted.any()):",
          "with m.If(0):",
          "memory/test_sbuf.py::test_a_group_is_held_equally_long_whatever_came_before"),
    Fault(SBUF + "_hold", "an engine keeps a group", " & (held != most - 1)", "",
          "memory/test_sbuf.py::test_nobody_holds_on_to_a_group"),
]  # fmt: skip

SEMAPHORE, DISPATCH = "control.semaphore:Semaphores.elaborate", "control.dispatch:DispatchDma."
QUEUE = "control.queue:InstructionQueue.elaborate"
STORE = "control.queue:InstructionStore.elaborate"
COUNTERS, FETCH = "control.counters:Counters.elaborate", "control.fetch:Fetch.elaborate"
FIXED, CHECKED = "control.check:_Fixed.elaborate", "control.check:_Operand.elaborate"
CONTROL, REGISTERS = "control.control:Control.elaborate", "control.registers:HostRegisters."

LEAVES = "control/test_queue.py::test_everything_leaves_once_and_in_order"
WAITS = "control/test_queue.py::test_both_waits_hold_before_an_instruction_is_offered"
LEGAL = "control/test_check.py::test_legal_words_pass"
WRONG = "control/test_check.py::test_every_wrong_field_is_reported"
COUNT = "control/test_counters.py::test_counts_agree_with_sums_at_any_time"
JOBS = "control/test_dispatch.py::test_every_engine_gets_each_job_once_and_in_order"
C = "control/test_control.py::"

CONTROLS = [
    Fault(SEMAPHORE, "sweep ends one early", "swept == self.config.semaphores - 1",
          "swept == self.config.semaphores - 2",
          "control/test_semaphore.py::test_a_sweep_clears_everything_and_holds_updates_back"),
    Fault(SEMAPHORE, "all sources taken at once", "port.ready.eq(turn.grant[i] & take)",
          "port.ready.eq(take)", "control/test_semaphore.py::"
          "test_adds_of_all_sources_in_the_same_cycle_are_all_made"),
    Fault(SEMAPHORE, "set adds", "Mux(chosen.mode == UpdateMode.ADD, total, chosen.value)",
          "total", "control/test_semaphore.py::test_random_updates_agree_with_a_list"),
    Fault(SEMAPHORE, "overflow not reported", " & total[32]", " & 0",
          "control/test_semaphore.py::test_an_overflow_is_reported_and_changes_nothing"),
    Fault(SEMAPHORE, "overflow written", " & ~overflow)", ")",
          "control/test_semaphore.py::test_an_overflow_is_reported_and_changes_nothing"),
    Fault(SEMAPHORE, "turns outlive a start", "ResetInserter(self.start)(turn)", "turn",
          "control/test_semaphore.py::test_a_start_gives_the_first_turn_to_the_first_source"),
    Fault(SEMAPHORE, "clear keeps what was taken", "pending.eq(0)", "pending.eq(pending)",
          "control/test_semaphore.py::"
          "test_clear_drops_the_update_that_has_been_taken_but_not_made"),
    Fault(SEMAPHORE, "updates taken during a sweep", "take.eq(~self.sweeping)", "take.eq(1)",
          "control/test_semaphore.py::test_a_sweep_clears_everything_and_holds_updates_back"),
    Fault(SEMAPHORE, "idle before the update is made", "eq(~pending & ~turn", "eq(~turn",
          "control/test_semaphore.py::test_idle_is_low_until_the_update_is_made"),
    Fault(QUEUE, "second wait ignored", "holds.all()", "holds[0]", WAITS),
    Fault(QUEUE, "GE read as GT", "seen >= wanted", "seen > wanted", WAITS),
    Fault(QUEUE, "skips an instruction", "self.issue_slot + self.issue_take",
          "self.issue_slot + self.issue_take + self.issue_take", LEAVES),
    Fault(QUEUE, "ready of the engine ignored", "taken.eq(self.issue.ready)", "taken.eq(1)",
          LEAVES),
    Fault(QUEUE, "counter counts twice", "issued.eq(issued + 1)", "issued.eq(issued + 2)", LEAVES),
    Fault(QUEUE, "address does not advance", "pc.eq(pc + WORD_BYTES)", "pc.eq(pc)", LEAVES),
    Fault(QUEUE, "reads a word over the one that waits", "ready.any() & ~asked & ~following_valid",
          "ready.any() & ~asked", LEAVES),
    Fault(QUEUE, "hold ignored", "self.run & ~self.hold", "self.run",
          "control/test_queue.py::test_nothing_new_is_offered_while_stopped_or_held"),
    Fault(QUEUE, "stop ignored", "self.run & ~self.hold", "~self.hold",
          "control/test_queue.py::test_nothing_new_is_offered_while_stopped_or_held"),
    Fault(QUEUE, "legal words behind an illegal one count",
          "self.verdict.code == ErrorCode.NONE) & ~bad", "self.verdict.code == ErrorCode.NONE)",
          "control/test_queue.py::"
          "test_words_that_are_legal_behind_an_illegal_one_do_not_count"),
    Fault(QUEUE, "clear keeps the head", "head_valid, offered, issued", "offered, issued",
          "control/test_queue.py::test_a_clear_forgets_everything"),
    Fault(QUEUE, "clear keeps the next word", "checking, following_valid,", "checking,",
          "control/test_queue.py::test_a_clear_forgets_everything"),
    Fault(QUEUE, "the first wait is shown always", "which.eq(holds[0])", "which.eq(0)",
          "control/test_queue.py::test_the_wait_that_does_not_hold_is_shown"),
    Fault(QUEUE, "updates not waited for", "Mux(updates, self.update.ready, is_event)", "is_event",
          LEAVES),
    Fault(STORE, "checks too close to each other", "cooldown.eq(FRAME_CYCLES - 1)",
          "cooldown.eq(FRAME_CYCLES - 2)",
          C + "test_the_store_reads_for_issue_first_and_keeps_checks_apart"),
    Fault(STORE, "checks go before issue", "~self.issue_want.any() & ~cooldown.any()",
          "~cooldown.any()", C + "test_the_store_reads_for_issue_first_and_keeps_checks_apart"),
    Fault(STORE, "turns outlive a start", "ResetInserter(self.start)(issue_turn)", "issue_turn",
          C + "test_a_start_gives_the_first_turn_at_the_store_to_the_first_queue"),
    Fault(STORE, "a check uses no turn", "check_turn.take.eq(self.check_take.any())",
          "check_turn.take.eq(0)", C + "test_queues_take_turns_at_being_checked"),
    Fault(STORE, "beats in reverse", "self.write.en << self.write.beat",
          "self.write.en << ~self.write.beat", C + "test_runs_a_program_on_all_queues_in_order"),
    Fault(DISPATCH + "elaborate", "turns outlive a start", "ResetInserter(self.start)(turn)",
          "turn", "control/test_dispatch.py::"
          "test_a_start_gives_the_first_turn_to_the_first_queue"),
    Fault(DISPATCH + "elaborate", "jobs handed over for ever", "pending[e] & ~port.ready",
          "pending[e]", JOBS),
    Fault(DISPATCH + "elaborate", "every engine gets a job from the first on",
          " & (e < job.first + job.engines_used)", "", JOBS),
    Fault(DISPATCH + "elaborate", "descriptors not shared out", "skip.eq(index * job.count)",
          "skip.eq(index)", JOBS),
    Fault(DISPATCH + "elaborate", "the next begins before all have their job",
          "located | multiplied | pending.any()", "located | multiplied", JOBS),
    Fault(DISPATCH + "elaborate", "clear keeps the jobs", "multiplied.eq(0), pending.eq(0)",
          "multiplied.eq(0)", "control/test_dispatch.py::"
          "test_clear_drops_what_has_not_been_handed_over"),
    Fault(COUNTERS, "accumulators too narrow", "event.width + (2 * n).bit_length()", "event.width",
          "control/test_counters.py::"
          "test_full_increments_with_reads_all_the_time_lose_nothing"),
    Fault(COUNTERS, "increments counted twice", "Mux(visit == i, 0, total)", "total", COUNT),
    Fault(COUNTERS, "the start is not counted", 'increment if event.source == "core" else 0', "0",
          COUNT),
    Fault(COUNTERS, "clear keeps the counts", "empty.eq(~0)", "empty.eq(empty)", COUNT),
    Fault(COUNTERS, "value does not hold", "valid & wanted", "valid",
          "control/test_counters.py::test_a_value_that_was_read_holds_until_the_next_read"),
    Fault(COUNTERS, "a read skips a visit", "Mux(self.read, self.select, turn)", "turn", COUNT),
    Fault(FETCH, "bases that cannot be reached are cut off", "self.start & unreachable", "0",
          C + "test_a_base_that_cannot_be_fetched_is_a_bus_error[0x4]"),
    Fault(FETCH, "more than the store holds", " & (taken[q] != depth)", "",
          C + "test_a_queue_that_waits_prefetches_no_more_than_its_store_holds"),
    Fault(FETCH, "ARVALID dropped before ARREADY", "m.If(bus.arready)", "m.If(1)",
          C + "test_runs_a_program_on_all_queues_in_order"),
    Fault(FETCH, "only the last beat may fail", "m.If(bad | bus.rresp[1])", "m.If(bus.rresp[1])",
          C + "test_a_bus_error_is_reported_when_the_instruction_has_its_turn"),
    Fault(FETCH, "a failed beat spoils the next burst", "(bad | bus.rresp[1]) & ~last",
          "bad | bus.rresp[1]",
          C + "test_a_bus_error_is_reported_when_the_instruction_has_its_turn"),
    Fault(FETCH, "bursts begun after a stop", " & ~self.failed[q] & self.run", " & ~self.failed[q]",
          C + "test_no_burst_is_begun_after_an_error"),
    Fault(FETCH, "idle with bursts on the bus", "~bus.arvalid & (asked.level == 0)",
          "~bus.arvalid", C + "test_a_reset_at_any_time_leaves_a_clean_machine"),
    Fault(FETCH, "the first queue goes always", "turn.take.eq(go)", "turn.take.eq(0)",
          C + "test_other_queues_issue_nothing_new_after_an_error"),
    Fault(FETCH, "turns outlive a start", "ResetInserter(self.start)(turn)", "turn",
          C + "test_what_ran_before_does_not_change_the_turns"),
    Fault(FIXED, "instruction of another queue accepted",
          '~on_this_queue | (header("engine") != self.queue)', "0",
          WRONG + "[eventsemaphore-TINY]"),
    Fault(CHECKED, "range check off by one", "high_byte >= space_bytes", "high_byte > space_bytes",
          WRONG),
    Fault(CHECKED, "elements below the memory", "(low_byte < 0)", "(low_byte < -1)", WRONG),
    Fault(CHECKED, "alignment not checked", "| misaligned", "| (misaligned & 0)", WRONG),
    Fault(CHECKED, "last partition refused", "start + count > config.partitions",
          "start + count >= config.partitions", LEGAL),
    Fault(CHECKED, "partition beyond the last accepted", "start + count > config.partitions",
          "start + count > config.partitions + 1", WRONG),
    Fault(CHECKED, "numbers of elements not compared", "~first_3 & (elements != first_elements)",
          "0", WRONG),
    Fault(CHECKED, "empty patterns checked", "~empty_4 & (", "(", WRONG),
    Fault(CHECKED, "banks may be crossed", "rules_4.one_bank & psum_4", "0 & psum_4", WRONG),
    Fault(FIXED, "semaphores without a wait checked", " & mode.any()", "", WRONG),
    Fault(FIXED, "descriptors beyond the address space", "first + total > 1 << len(table)",
          "first + total > 2 << len(table)", WRONG),
    Fault(FIXED, "reserved bits accepted", "reserved_2.eq(reserved.any())", "reserved_2.eq(0)",
          WRONG),
    Fault("control.check:Checker.elaborate", "the last operand alone counts",
          "Mux(first_5, fixed_5, best)", "fixed_5", WRONG),
    Fault("control.check:Checker.elaborate", "the last error wins",
          "operand.key < so_far, operand.key", "(operand.key != _NO_ERROR), operand.key", WRONG),
    Fault(CONTROL, "done before DMA is", "            & ~self.dma_busy.any()\n", "",
          C + "test_done_waits_for_dma_that_updates_nothing[0.0]"),
    Fault(CONTROL, "done before an engine is", "            & ~self.dve_busy\n", "",
          C + "test_done_waits_for_an_engine_that_updates_nothing"),
    Fault(CONTROL, "done before the jobs are handed over", "            & ~dispatch.busy\n", "",
          C + "test_done_waits_for_dma_that_updates_nothing"),
    Fault(CONTROL, "done at the first quiet cycle", "settled == SETTLE_CYCLES - 1", "settled == 0",
          C + "test_runs_a_program_on_all_queues_in_order[0.0-3]"),
    Fault(CONTROL, "the last error is kept", "| expired) & ~failed", "| expired)",
          C + "test_dma_errors_are_taken_and_the_first_is_kept"),
    Fault(CONTROL, "a start after an error starts", "~busy & ~failed & ~resetting",
          "~busy & ~resetting", C + "test_a_start_after_an_error_changes_nothing"),
    Fault(CONTROL, "a start during a reset starts", "~busy & ~failed & ~resetting",
          "~busy & ~failed", C + "test_a_reset_at_any_time_leaves_a_clean_machine"),
    Fault(CONTROL, "a start while busy starts", "registers.start & ~busy", "registers.start",
          C + "test_a_start_while_busy_changes_nothing"),
    Fault(CONTROL, "reset does not wait for DMA", "self.dma_drained.all() & fetch.idle",
          "fetch.idle", C + "test_a_reset_is_long_enough_and_waits_for_dma"),
    Fault(CONTROL, "reset does not wait for fetch", "self.dma_drained.all() & fetch.idle",
          "self.dma_drained.all()", C + "test_a_reset_at_any_time_leaves_a_clean_machine"),
    Fault(CONTROL, "reset of one cycle", "m.d.sync += left.eq(RESET_CYCLES - 1)",
          "m.d.sync += left.eq(0)", C + "test_a_reset_is_long_enough_and_waits_for_dma"),
    Fault(CONTROL, "reset keeps the error", "busy.eq(0), done.eq(0), failed.eq(0)]",
          "busy.eq(0), done.eq(0)]", C + "test_dma_errors_are_taken_and_the_first_is_kept"),
    Fault(CONTROL, "DMA is not let go after a reset",
          "[self.engine_reset.eq(0), self.dma_halt.eq(0)]", "[self.engine_reset.eq(0)]",
          C + "test_a_reset_is_long_enough_and_waits_for_dma"),
    Fault(CONTROL, "the watchdog names the last queue", "reversed(list(enumerate(queues)))",
          "list(enumerate(queues))", C + "test_the_watchdog_names_the_first_queue_that_waits"),
    Fault(CONTROL, "the watchdog does not see DMA",
          "(self.pe_events, self.dve_events, self.dma_events)",
          "(self.pe_events, self.dve_events)",
          C + "test_a_beat_between_dma_and_sbuf_is_progress"),
    Fault(CONTROL, "watchdog never off", " & registers.watchdog.any()", "",
          C + "test_the_watchdog_leaves_slow_runs_alone_and_zero_is_never"),
    Fault(CONTROL, "issue during a sweep", "queue.hold.eq(semaphores.sweeping)", "queue.hold.eq(0)",
          C + "test_nothing_is_issued_before_a_sweep_has_ended"),
    Fault(CONTROL, "cycles of the start not counted", "start | busy", "busy",
          C + "test_core_cycles_count_from_the_accepted_start_to_the_visible_end"),
    Fault(REGISTERS + "_writes", "a write over an answer", "has_data & ~host.bvalid", "has_data",
          "control/test_registers.py::"
          "test_a_response_that_is_not_taken_keeps_the_next_write_waiting"),
    Fault(REGISTERS + "_writes", "partial writes performed", "strobe.all() & ~address", "~address",
          "control/test_registers.py::test_refused_writes_change_nothing"),
    Fault(REGISTERS + "_writes", "reset and start at once", '"start") & ~reset', '"start")',
          "control/test_registers.py::test_control_and_clear_are_strobes_and_reset_wins"),
    Fault(REGISTERS + "_writes", "semaphores written while busy", " & whole & ~self.busy",
          " & whole",
          "control/test_registers.py::test_semaphores_are_read_and_written_unless_busy_or_sweeping"),
    Fault(REGISTERS + "_writes", "answers not waited for", "m.Elif(host.bready)", "m.Else()",
          "control/test_registers.py::"
          "test_a_response_that_is_not_taken_keeps_the_next_write_waiting"),
    Fault(REGISTERS + "_writes", "writes before the core is up", " & ~self.wait)", ")",
          C + "test_the_very_first_write_may_be_the_start"),
    Fault(REGISTERS + "_reads", "answers not waited for", "m.Elif(host.rready)", "m.Else()",
          "control/test_registers.py::test_read_data_that_are_not_taken_stay"),
    Fault(REGISTERS + "_reads", "semaphores read in a sweep", " & ~(in_semaphores & self.sweeping)",
          "", "control/test_registers.py::"
          "test_semaphores_are_read_and_written_unless_busy_or_sweeping"),
    Fault(REGISTERS + "_reads", "latched word of any counter",
          "has_latched & (latched == self.counter_select)", "has_latched",
          "control/test_registers.py::"
          "test_another_counter_read_between_the_words_ends_the_latch"),
    Fault(REGISTERS + "_reads", "latched for ever", "has_latched.eq(~high)", "has_latched.eq(1)",
          "control/test_registers.py::test_a_latched_high_word_is_given_once"),
]  # fmt: skip

ARRAY, WALK, HBM = "engines.array:", "engines.dma_walk:", "engines.dma_hbm:"
PLAN, DMA_QUEUES = "engines.dma_plan:DmaPlanner.", "engines.dma_queues:DmaQueues."
BUFFER, DMA = "engines.dma_buffer:", "engines.dma:DmaEngine."
D = "engines/test_dma.py::"
RANDOM_DMA = D + "test_random_descriptors_in_four_queues_copy_the_right_bytes"
BURSTS = "engines/test_dma_walk.py::test_bursts_cover_a_run_and_end_at_their_boundaries"
BEATS = "engines/test_dma_walk.py::test_beats_cover_a_run_and_are_aligned"
WRITES = "engines/test_dma_hbm.py::test_write_bursts_have_their_addresses_strobes_and_answers"
SPLIT = WALK + "BurstSplitter.elaborate"

ENGINES = [
    Fault(ARRAY + "Pe.elaborate", "swap ignored", "m.If(self.swap)", "m.If(self.swap & 0)",
          "engines/test_array.py::test_a_load_takes_effect_with_the_swap"),
    Fault(ARRAY + "Pe.elaborate", "load overwrites the active weight", "shadow.eq(self.weight)",
          "[shadow.eq(self.weight), active.eq(self.weight)]",
          "engines/test_array.py::test_a_load_takes_effect_with_the_swap"),
    Fault(ARRAY + "Pe.elaborate", "a reset keeps the weight",
          'active = Signal(Operand, init={"kind": Kind.VOID})',
          'active = Signal(Operand, init={"kind": Kind.VOID}, reset_less=True)',
          "engines/test_array.py::test_a_reset_makes_the_weights_void"),
    Fault(ARRAY + "Quad.elaborate", "weight lanes swapped", "self.o.lanes[lane]",
          "self.o.lanes[lane ^ 1]",
          "engines/test_array.py::test_weights_go_to_their_lanes_of_their_quad"),
    Fault(ARRAY + "Quad.elaborate", "lane mask ignored", "mine & self.o.mask[lane]", "mine",
          "engines/test_array.py::test_weights_go_to_their_lanes_of_their_quad"),
    Fault(ARRAY + "Quad.elaborate", "number of the quad ignored",
          " & (self.o.quad == self.index)", "",
          "engines/test_array.py::test_weights_go_to_their_lanes_of_their_quad"),
    Fault(ARRAY + "ArrayRow.elaborate", "all quads are the first", "quad.index.eq(q)",
          "quad.index.eq(0)",
          "engines/test_array.py::test_every_quad_of_a_row_takes_its_weights_in_its_cycle"),
    Fault(ARRAY + "ArrayRow.elaborate", "quads in parallel", "            bus = quad.o\n", "",
          "engines/test_array.py::test_every_quad_of_a_row_takes_its_weights_in_its_cycle"),
    Fault(ARRAY + "Edge.elaborate", "a partition too many", "self.index < side.stop",
          "self.index <= side.stop",
          "engines/test_tensor.py::test_short_tiles_ignore_what_lies_around_them"),
    Fault(ARRAY + "Edge.elaborate", "half of the skew", "self.index * ROW_SKEW", "self.index",
          "engines/test_tensor.py::test_one_tile"),
    Fault(ARRAY + "ArrayBlock.elaborate", "blocks count their rows from zero",
          "self.index * rows + k", "k", "engines/test_tensor.py::test_eight_by_eight"),
    Fault(BUFFER + "BeatPipe.elaborate", "strobes not moved", "(ones << s1.phase)[:8]", "ones",
          WRITES),
    Fault(BUFFER + "ByteBuffer.elaborate", "space is not given back",
          "self.space + pop_count - self.reserve", "self.space - self.reserve",
          D + "test_plans_wait_for_the_unit_that_carries_them_out"),
    Fault(BUFFER + "ByteBuffer.elaborate", "bytes promised twice",
          "self.available + put_count - self.claim", "self.available + put_count", RANDOM_DMA),
    Fault(BUFFER + "ByteBuffer.elaborate", "rows not split", "lanes & ~upper", "0", RANDOM_DMA),
    Fault(BUFFER + "BeatPipe.elaborate", "back-pressure ignored", "~self.o.valid | self.o.ready",
          "1", WRITES),
    Fault(BUFFER + "BeatPipe.elaborate", "the other buffer's bytes",
          "Mux(s1.buffer, self.buffer_data[1], self.buffer_data[0])",
          "Mux(s1.buffer, self.buffer_data[0], self.buffer_data[1])", RANDOM_DMA),
    Fault(SPLIT, "ready ignored", "m.Elif(self.o.ready)", "m.Else()", BURSTS),
    Fault(WALK + "Walker.elaborate", "counts are not restored",
          "Mux(left[d] == 0, plan.counts[d], left[d] - 1)", "left[d] - 1", RANDOM_DMA),
    Fault(SPLIT, "burst boundary, and 4 KiB, ignored", "room.eq(burst - run.address[:bits])",
          "room.eq(burst)", BURSTS),
    Fault(SPLIT, "burst length off by one", "room.eq(burst - run.address[:bits])",
          "room.eq(burst - run.address[:bits] - 1)", BURSTS),
    Fault(SPLIT, "last burst of a full run not last", "run.bytes <= room", "run.bytes < room",
          BURSTS),
    Fault(SPLIT, "every burst is the last", "ends & run.last", "run.last", BURSTS),
    Fault(WALK + "BeatSplitter.elaborate", "position across in bytes",
          "(partition & group) << size", "partition & group", BEATS),
    Fault(WALK + "BeatSplitter.elaborate", "goes on within the beat", "(partition | group) + 1",
          "partition + 1", BEATS),
    Fault(HBM + "HbmReader.elaborate", "the last error is kept",
          "head.descriptor & failed & ~self.error.valid", "head.descriptor & failed",
          "engines/test_dma_hbm.py::"
          "test_the_first_of_two_bus_errors_is_the_one_that_is_kept"),
    Fault(HBM + "_words_minus_one", "AXI length off by one", "count + 7", "count + 8", WRITES),
    Fault(HBM + "_Beats.__init__", "byte strobes of later beats wrong", "Mux(started, 0, phase)",
          "phase", WRITES),
    Fault(HBM + "HbmWriter._addresses", "AWVALID dropped before AWREADY", "m.Elif(axi.awready)",
          "m.Else()", WRITES),
    Fault(HBM + "HbmWriter._addresses", "a burst before its bytes are there",
          " & (burst.bytes <= available)", "", "engines/test_dma_hbm.py::"
          "test_no_write_burst_is_begun_after_a_stop_or_without_its_bytes"),
    Fault(HBM + "HbmWriter._addresses", "stop ignored", "                & ~self.stop\n", "",
          "engines/test_dma_hbm.py::"
          "test_no_write_burst_is_begun_after_a_stop_or_without_its_bytes"),
    Fault(HBM + "HbmWriter._data", "WLAST in every beat", "pipe.i.p.about.eq(beat.ends)",
          "pipe.i.p.about.eq(1)", WRITES),
    Fault(HBM + "HbmWriter.elaborate", "done after the first response",
          "answered & head.last & ~axi.bresp[1]", "answered & ~axi.bresp[1]", WRITES),
    Fault(HBM + "HbmWriter.elaborate", "write error ignored",
          "self.error.valid.eq(answered & axi.bresp[1])", "self.error.valid.eq(0)", WRITES),
    Fault(HBM + "HbmReader.elaborate", "a burst without room", " & (burst.bytes <= self.space)",
          "", "engines/test_dma_hbm.py::"
          "test_no_read_burst_is_begun_after_a_stop_or_without_room"),
    Fault(HBM + "HbmReader.elaborate", "stop ignored", " & ~self.stop", "",
          "engines/test_dma_hbm.py::test_no_read_burst_is_begun_after_a_stop_or_without_room"),
    Fault(HBM + "HbmReader.elaborate", "bytes put after a bus error",
          "~failed & ~self.error.valid),\n            self.put.data", "~failed),\n"
          "            self.put.data",
          "engines/test_dma_hbm.py::test_nothing_is_put_from_a_bus_error_on"),
    Fault(HBM + "HbmReader.elaborate", "bursts begun after a bus error",
          " & ~self.stop & ~self.error.valid", " & ~self.stop",
          "engines/test_dma_hbm.py::test_no_burst_is_begun_after_a_bus_error"),
    Fault(HBM + "HbmReader.elaborate", "data go before descriptors",
          "free & ~self.fetch.valid & splitter", "free & splitter", "engines/test_dma_hbm.py::"
          "test_descriptors_go_before_data_and_are_no_data"),
    Fault(PLAN + "_store", "bits beyond the last field accepted",
          "tail.eq(tail_now & (word.index != 15))", "tail.eq(0)",
          D + "test_bits_beyond_the_last_field_are_refused"),
    Fault(PLAN + "_control", "sides of different size", "self.total != self.src_total",
          "self.total < self.src_total", D + "test_a_bad_descriptor_moves_nothing_and_is_named"),
    Fault(PLAN + "_dimension", "runs across merged with runs along", "~self.across & (step ==",
          "(step ==", D + "test_columns_across_partitions_are_not_one_run_although_their_step_is_"
          "its_length"),
    Fault(PLAN + "_dimension", "way back forgotten", "step - self.back", "step", RANDOM_DMA),
    Fault(PLAN + "_reach", "negative steps reach upwards", "here & (self.product < 0)", "here & 0",
          D + "test_a_bad_descriptor_moves_nothing_and_is_named"),
    Fault(PLAN + "_conclude_side", "a byte too far accepted",
          "self.bytes_high >= config.sbuf_bytes", "self.bytes_high > config.sbuf_bytes",
          D + "test_sbuf_that_does_not_fill_its_window_is_checked_to_the_byte"),
    Fault(PLAN + "_conclude_side", "partitions beyond the last",
          "self.parts_high >= config.partitions", "self.parts_high > config.partitions",
          D + "test_a_bad_descriptor_moves_nothing_and_is_named"),
    Fault(PLAN + "_room", "plans overwrite each other",
          "                    ~self._plans[0][b].valid\n                    & ~self",
          "                    ~self", D + "test_plans_wait_for_the_unit_that_carries_them_out"),
    Fault(PLAN + "_room", "a buffer serves two writers", "(inside == 0) | (writer == dst)", "1",
          RANDOM_DMA),
    Fault(DMA_QUEUES + "_allocate", "turns outlive the work", "ResetInserter(~self.busy)(turn)",
          "turn", D + "test_an_idle_engine_gives_the_first_turns_to_queue_0"),
    Fault(DMA_QUEUES + "_accept", "full queues take jobs", " & room.bit_select(mine, 1)", "",
          D + "test_jobs_wait_while_their_queue_is_full"),
    Fault(DMA_QUEUES + "_allocate", "the first queue is served always", "turn.take.eq(take)",
          "turn.take.eq(0)", D + "test_queues_take_turns"),
    Fault(DMA_QUEUES + "_allocate", "slots overwritten", " & ~ring.full", "",
          D + "test_a_long_chain_wraps_the_slots"),
    Fault(DMA_QUEUES + "_start", "a descriptor starts before the one it reads from",
          "(ring.started == ring.retired)", "1", D +
          "test_a_descriptor_reads_the_last_element_that_the_one_before_wrote"),
    Fault(DMA_QUEUES + "_start", "room ignored", " & self.room.bit_select(Cat(src, dst), 1)", "",
          D + "test_plans_wait_for_the_unit_that_carries_them_out"),
    Fault(DMA_QUEUES + "_retire", "every descriptor updates",
          "take & _selected(pick, [ring.at(ring.ends_job, ring.retired) for ring in rings])",
          "take", RANDOM_DMA),
    Fault(DMA_QUEUES + "_retire", "updates overwritten", " & ~found & ~self.update.valid",
          " & ~found", D + "test_every_job_updates_once_in_order_while_the_consumer_stalls"),
    Fault(DMA_QUEUES + "_retire", "updates after a stop", "pick.any() & ~self.stop", "pick.any()",
          D + "test_a_halt_before_the_last_answer_leaves_the_job_without_update"),
    Fault("engines.dma_sbuf:SbufWriter.elaborate", "beats before their bytes are there",
          "                & (beat.count <= Mux(beat.about.buffer, self.available[1],"
          " self.available[0]))\n", "", RANDOM_DMA + "[calm]"),
    Fault("engines.dma_sbuf:SbufReader.elaborate", "reads without room",
          "                & (beat.count <= self.space)\n", "",
          D + "test_a_store_reads_no_more_than_there_is_room_for"),
    Fault("engines.dma_sbuf:SbufReader.elaborate", "answers are not shifted to their place",
          "later.eq(asked)", "later.eq(0)", RANDOM_DMA),
    Fault("engines.dma_sbuf:SbufWriter.elaborate", "done at every beat",
          "self.o.ready & ahead.last", "self.o.ready", RANDOM_DMA),
    Fault(DMA + "_stop", "the wrong code of a write error", "ErrorCode.BUS_WRITE",
          "ErrorCode.BUS_READ", D + "test_a_write_error_in_any_burst_stops_the_engine[0]"),
    Fault(DMA + "elaborate", "a writer that is never done", "queues.done[1].eq(sbuf_writer.done)",
          "queues.done[1].eq(planner.done)", D + "test_whole_bursts_are_not_followed_by_another"),
    Fault(DMA + "_stop", "halt ignored", "stop.eq(self.halt | raised)", "stop.eq(raised)",
          D + "test_a_halt_before_the_last_answer_leaves_the_job_without_update"),
    Fault(DMA + "_stop", "errors before their turn",
          "what.valid & (queues.oldest[what.tag.queue] == what.tag.slot)", "what.valid",
          D + "test_a_bad_descriptor_is_reported_after_the_loads_before_it"),
    Fault(DMA + "_connect_axi", "drained with writes under way", "reader.idle & writer.idle",
          "reader.idle", D + "test_a_write_error_in_any_burst_stops_the_engine[0]"),
    Fault(DMA + "_events", "one beat of two", "(write.valid & write.ready) + (",
          "(write.valid & write.ready) | (", D + "test_every_beat_of_sbuf_is_an_event"),
]  # fmt: skip

UNITS, TENSOR = "engines.tensor_units:", "engines.tensor:TensorSequencer.elaborate"
VECTOR = "engines.vector:Sequencer.elaborate"
PATTERN, LANE = "engines.vector:PatternWalker.elaborate", "engines.vector:VectorLane.elaborate"
S = "engines/test_tensor_sequencer.py::"
V = "engines/test_vector.py::"
WALKER = "engines/test_vector_parts.py::test_a_walker_visits_the_elements_of_a_pattern_in_order"
MOVING = S + "test_moving_operand_and_sums_follow_their_patterns"

COMPUTE = [
    Fault(UNITS + "MatmulUnit.elaborate", "a word read for every element",
          "first | (word != self.port.word)", "1", S + "test_moving_operand_reads_a_word_once"),
    Fault(UNITS + "Walker.elaborate", "count off by one", "remaining[d] == 1 for d",
          "remaining[d] == 0 for d", MOVING),
    Fault(UNITS + "Walker.elaborate", "bases of the inner dimensions kept",
          "*(bases[e].eq(moved) for e in range(1, d + 1))", "bases[d].eq(moved)", MOVING),
    Fault(UNITS + "Completion.elaborate", "updates before their work", " & (finished != 0)),\n"
          "            pop", "),\n            pop", S + "test_latencies"),
    Fault(UNITS + "Completion.elaborate", "work finished while one waits is forgotten",
          "finished + done - pop", "Mux(pop, 0, finished + done)",
          S + "test_updates_in_order_with_back_pressure"),
    Fault(UNITS + "Completion.elaborate", "updates of mode NONE offered",
          "waiting.o.valid & wanted & (finished", "waiting.o.valid & (finished",
          MOVING),
    Fault(UNITS + "Dispatcher.elaborate", "a load overwrites the one that waits",
          "~loads.valid | loads.ready", "1", S + "test_loads_that_wait_keep_their_order"),
    Fault(UNITS + "Dispatcher.elaborate", "a load swaps twice", "fresh.eq(fresh & null)",
          "fresh.eq(fresh)", S + "test_loads_without_matmul_between_do_not_wait_for_each_other"),
    Fault(UNITS + "Dispatcher.elaborate", "empty loads swap", "fresh.eq(fresh | ~null)",
          "fresh.eq(1)", S + "test_no_elements"),
    Fault(UNITS + "Beats.elaborate", "beats cross a word",
          "                    & (address[i][WORD_LOG2:] == walker.address[WORD_LOG2:])\n", "",
          S + "test_weights_come_from_their_pattern"),
    Fault(UNITS + "Beats.elaborate", "beats cross a quad", "lane < QUAD - i", "lane <= QUAD - i",
          S + "test_weights_come_from_their_pattern"),
    Fault(UNITS + "LoadUnit.elaborate", "a load does not wait for its swap",
          "output_valid & (output.tag == self.swaps)", "output_valid",
          S + "test_a_load_waits_for_the_swap_before_it"),
    Fault(UNITS + "LoadUnit.elaborate", "refusals ignored",
          "allowed & (self.port.ready | output.null)", "allowed",
          S + "test_weights_come_from_their_pattern"),
    Fault(UNITS + "LoadUnit.elaborate", "beats overtake those of the load before",
          "                & (first.parity == second.parity)\n", "",
          S + "test_beats_overtake_only_within_their_load"),
    Fault(UNITS + "LoadUnit.elaborate", "the last beat is lost when overtaken",
          "first.last.eq(second.last)", "first.last.eq(0)",
          S + "test_overtaken_beats_of_every_length"),
    Fault(UNITS + "MatmulUnit.elaborate", "a sum follows too closely",
          "go.eq(wave_valid & ~hazard)", "go.eq(wave_valid)",
          S + "test_sums_that_follow_too_closely_are_held_back"),
    Fault(UNITS + "MatmulUnit._start", "a matmul does not wait for its weights",
          "~work.swap | (self.loads == work.tag)", "1", S + "test_loads_hide_behind_matmuls"),
    Fault(UNITS + "MatmulUnit._start", "interval one short", "interval.eq(MIN_INTERVAL - 1)",
          "interval.eq(MIN_INTERVAL - 2)", S + "test_interval_without_loads"),
    Fault(UNITS + "MatmulUnit._start", "bank of the vector engine entered",
          "seen & ~self.psum_busy_dve.bit_select(work.bank, 1)", "seen",
          S + "test_psum_bank_of_the_vector_engine_is_waited_for"),
    Fault(UNITS + "MatmulUnit._start", "bank entered before it is shown",
          "(seen & ~self.psum_busy_dve.bit_select(work.bank, 1))",
          "~self.psum_busy_dve.bit_select(work.bank, 1)",
          S + "test_both_want_a_bank_in_the_same_cycle"),
    Fault(UNITS + "MatmulUnit._start", "starving DMA gets nothing",
          "(self.starving & reads & reads_before).any() & ~yielded", "0",
          S + "test_starving_dma_gets_one_cycle_between_waves"),
    Fault(TENSOR, "a bank is left before its sums are written", "left.eq(self.drain_cycles)",
          "left.eq(self.drain_cycles - 2)", S + "test_latencies[SMALL]"),
    Fault(TENSOR, "edges told a cycle early", "range(SBUF_READ_CYCLES)",
          "range(SBUF_READ_CYCLES - 1)", "engines/test_tensor.py::test_one_tile"),
    Fault(TENSOR, "turns outlive the updates", "ResetInserter(~turns.requests.any())(turns)",
          "turns", "engines/test_tensor.py::"
          "test_what_updated_last_does_not_change_who_updates_first"),
    Fault(TENSOR, "an update over one that waits", "~self.update.valid | self.update.ready", "1",
          S + "test_updates_in_order_with_back_pressure"),
    Fault("engines.tensor:TensorEngine.elaborate", "partial sums do not pass the blocks",
          "            above = block.psum_out\n        m.d.comb += psum.sums.eq(above)",
          "        m.d.comb += psum.sums.eq(block.psum_out)",
          "engines/test_tensor.py::test_eight_by_eight"),
    Fault(PATTERN, "element size ignored", " << self.size_log2", "", WALKER),
    Fault(PATTERN, "sign of the step", "base[i] + step[i]", "base[i] - step[i]", WALKER),
    Fault(PATTERN, "strides of two dimensions swapped", 'self.pattern[f"step{i}"]',
          'self.pattern[f"step{i ^ 1}"]', WALKER),
    Fault(PATTERN, "count off by one", "left[i].eq(loaded)", "left[i].eq(loaded + 1)", WALKER),
    Fault(PATTERN, "word boundary missed", "following[4:] != self.address[4:]",
          "following[5:] != self.address[5:]", WALKER),
    Fault(LANE, "saturate ignored", "cast_out.saturate.eq(self.saturate)",
          "cast_out.saturate.eq(0)", LANE_TEST),
    Fault(LANE, "quadrant shift ignored", "Mux(self.shift[1], pairs[1], pairs[0])", "pairs[0]",
          LANE_TEST),
    Fault(LANE, "copy through the cast", "Mux(self.copy, bits, cast_out.raw)", "cast_out.raw",
          LANE_TEST),
    Fault(LANE, "PSUM and SBUF swapped", "Mux(self.from_psum, psum, sbuf)",
          "Mux(self.from_psum, sbuf, psum)", LANE_TEST),
    Fault(VECTOR, "refused reads lost", "offered & (~from_sbuf | self.read_ready)", "offered",
          V + "test_refused_reads_cost_cycles_and_nothing_else"),
    Fault(VECTOR, "banks of the tensor engine entered", "start.eq(can_start & ~blocked)",
          "start.eq(can_start)",
          V + "test_psum_copy_starts_when_the_tensor_engine_leaves_its_banks"),
    Fault(VECTOR, "banks not given back", "[running.eq(0), self.psum_busy_dve.eq(0)]",
          "running.eq(0)", V + "test_psum_banks_are_held_from_first_to_last_element"),
    Fault(VECTOR, "banks asked for too early", "~reads_psum | (prepared == 2)", "1",
          V + "test_psum_banks_are_held_from_first_to_last_element"),
    Fault(VECTOR, "words committed one late", "closing[0] | dst_walker.moved", "dst_walker.moved",
          V + "test_an_element_may_be_the_last_of_all_in_any_word"),
    Fault(VECTOR, "no gap for starving DMA", "self.starving.any() & (rest == 0)", "0",
          V + "test_starving_makes_one_gap_in_sixteen_cycles"),
    Fault(VECTOR, "gaps without end", "rest.eq(GAP_CYCLES - 1)", "rest.eq(1)",
          V + "test_starving_makes_one_gap_in_sixteen_cycles"),
    Fault(VECTOR, "updates before the last write", "after(VECTOR_CYCLES, finishing & steer.updates",
          "after(VECTOR_CYCLES - 1, finishing & steer.updates",
          V + "test_an_instruction_reads_what_the_update_before_it_announced"),
    Fault(VECTOR, "idle with updates owed", " | (owed != 0)", "",
          V + "test_busy_lasts_until_the_update_is_taken"),
    Fault(VECTOR, "a partition too many", "(stop > p)", "(stop >= p)",
          V + "test_partitions_shift_by_whole_quadrants"),
    Fault("engines.vector:Sequencer._banks_of", "negative steps reach upwards",
          "down.eq(step < 0)", "down.eq(0)",
          V + "test_psum_banks_are_held_from_first_to_last_element"),
    Fault("engines.vector:VectorEngine.elaborate", "quadrants in reverse",
          "(p - k * config.quadrant)", "(p + k * config.quadrant)",
          V + "test_partitions_shift_by_whole_quadrants"),
]  # fmt: skip

CORE = "core:Core.elaborate"
PRODUCT = "test_core.py::test_a_product_from_hbm_to_hbm_and_again_after_a_reset_in_it"
COMPLETE = "test_core.py::test_done_means_that_work_which_updates_nothing_is_complete"
BANKS = "test_core.py::test_the_engines_wait_for_each_others_psum_bank"

WIRING = [
    Fault(CORE, "work of the vector engine not told", "control.dve_busy.eq(vector.busy)",
          "control.dve_busy.eq(0)", COMPLETE + "[vector]"),
    Fault(CORE, "engines are never reset", "self.engines_domain.rst.eq(control.engine_reset)",
          "self.engines_domain.rst.eq(0)", PRODUCT),
    Fault(CORE, "updates of the vector engine from nowhere",
          "connect_streams(m, vector.update, control.dve_update)", "pass", PRODUCT),
    Fault(CORE, "DMA not halted", "engine.halt.eq(control.dma_halt)", "engine.halt.eq(0)",
          "test_core.py::test_a_reset_does_not_wait_until_a_transfer_is_complete"),
    Fault(CORE, "starving not told", "vector.starving.eq(sbuf.starving)", "vector.starving.eq(0)",
          "test_core.py::test_the_vector_engine_leaves_gaps_for_a_load_into_its_bank"),
    Fault(CORE, "banks of the vector engine not told",
          "tensor.psum_busy_dve.eq(vector.psum_busy_dve)", "tensor.psum_busy_dve.eq(0)", BANKS),
    Fault(CORE, "banks of the tensor engine not told",
          "vector.psum_busy_pe.eq(tensor.psum_busy_pe)", "vector.psum_busy_pe.eq(0)", BANKS),
    Fault(CORE, "work of the tensor engine not told", "control.pe_busy.eq(tensor.busy)",
          "control.pe_busy.eq(0)", COMPLETE + "[tensor]"),
    Fault(CORE, "work of DMA not told", "control.dma_busy[i].eq(engine.busy)",
          "control.dma_busy[i].eq(0)", COMPLETE + "[dma]"),
    Fault(CORE, "errors of DMA not told", "control.dma_error[i].eq(engine.error)",
          "control.dma_error[i].valid.eq(0)", "test_core.py::test_a_bad_descriptor_stops_the_core"),
]  # fmt: skip

ANGLE, ANGLES = "arith.angle:AngleReducer.elaborate", "arith/test_angle.py::test_an_angle_per_cycle"
TABLES, UNIT = "engines.activation:ActivationTables.elaborate", "engines.activation:FunctionUnit."
TABLE_TEST = "engines/test_activation.py::test_a_table_is_written_once_and_as_it_is_declared"
UNIT_TEST = "engines/test_activation.py::test_every_table_with_a_few_arguments"
ACT_LANE = "engines.activation:ActivationLane.elaborate"
ACT_LANE_TEST = "engines/test_activation.py::test_a_lane_casts_scales_and_computes"

ACTIVATION = [
    Fault(ANGLE, "the nearer multiple is not taken", " ^ fold.replicate(len(s3_turns))", "",
          ANGLES),
    Fault(ANGLE, "parity of twice the quotient", "s2_quotient[-1], 2", "s2_quotient[-2], 2",
          ANGLES),
    Fault(ANGLE, "rounding dropped", "kept + 1", "kept", ANGLES),
    Fault(ANGLE, "exponent of a product with a leading zero", "125 - s5_zeros + upper",
          "126 - s5_zeros", ANGLES),
    Fault(ANGLE, "the window stands still", " >> (_LAST_EXPONENT - field)[:7]", "", ANGLES),
    Fault(TABLES, "the last entry is missing", "address != last", "address + 1 != last",
          TABLE_TEST),
    Fault(TABLES, "a table is loaded again", " & ~(valid & (loaded == self.function))", "",
          TABLE_TEST),
    Fault(TABLES, "functions without a table load one", "self.load & has_table", "self.load",
          TABLE_TEST),
    Fault(TABLES, "not busy with the last entry", "begin | reading | arriving", "begin | reading",
          TABLE_TEST),
    Fault(UNIT + "elaborate", "the sign of an odd function is lost",
          "(self.odd & sign[looked_up])", "0", UNIT_TEST),
    Fault(UNIT + "elaborate", "infinity is an argument like others", "magnitude >= limit",
          "magnitude > limit", UNIT_TEST),
    Fault(UNIT + "elaborate", "zero has no outcome", "zero[1] & self.outcomes.zeros", "0",
          UNIT_TEST),
    Fault(UNIT + "elaborate", "n ln 2 is not added", "Mux(log[late], polynomial[late], ",
          "Mux(0, polynomial[late], ", UNIT_TEST),
    Fault(UNIT + "elaborate", "-0 is less than 0", "sign[1] & ~zero[1]", "sign[1]",
          ACT_LANE_TEST),
    Fault(UNIT + "elaborate", "an outcome is not kept",
          "Mux(special[at], r[at], difference.result)", "difference.result", UNIT_TEST),
    Fault(UNIT + "_significand", "subnormals are not normalised", "_EXPONENT_BIAS - zeros",
          "_EXPONENT_BIAS", UNIT_TEST),
    Fault(UNIT + "_reduced", "parity of the exponent", "_EXPONENT_BIAS + e[0]", "_EXPONENT_BIAS",
          UNIT_TEST),
    Fault(UNIT + "_index", "small exponents wrap", "Mux(ahead < 0, 0, ahead)", "ahead",
          UNIT_TEST),
    Fault(UNIT + "_power_of_two", "powers of two wrap", "Mux(field > 255, 255, field)", "field",
          UNIT_TEST),
    Fault(UNIT + "_power_of_two", "one subnormal power", "1 << 21", "1 << 22", UNIT_TEST),
    Fault(ACT_LANE, "the bias comes too early", "_ARGUMENT_CYCLE + _ADDEND_CYCLE]",
          "_ARGUMENT_CYCLE]", ACT_LANE_TEST),
    Fault(ACT_LANE, "the scale is loaded in the bias", "own_bias.eq(cast_in.value)",
          "own_scale.eq(cast_in.value)", ACT_LANE_TEST),
    Fault(ACT_LANE, "the upper two quadrants are exchanged",
          "Mux(self.shift[0], far[3], far[2])", "Mux(self.shift[0], far[2], far[3])",
          ACT_LANE_TEST),
]  # fmt: skip

FAULTS = [*LIB, *ARITH, *MEMORY, *CONTROLS, *ENGINES, *COMPUTE, *ACTIVATION, *WIRING]
PARTS = ("arith", "control", "engines", "lib", "memory")
NOTICES = {"AssertionError", "Failed", "TimeoutError"}
"""Exceptions by which a test notices; broken Python would raise others."""


def pytest_generate_tests(metafunc):
    if "fault" in metafunc.fixturenames:
        faults = selected(metafunc.config)
        metafunc.parametrize("fault", faults, ids=lambda fault: f"{fault.where} {fault.name}")


def selected(config):
    """What is judged in this run: all, or the first of every module."""
    modules = {fault.module: fault for fault in reversed(FAULTS)}
    return FAULTS if config.getoption("--all-faults") else list(modules.values())[::-1]


@pytest.fixture(scope="module")
def jury():
    jury = Jury()
    yield jury
    jury.close()


def test_every_judge_passes_without_a_fault(jury, pytestconfig):
    judges = sorted({fault.judge for fault in selected(pytestconfig)})
    verdict = jury.verdict(*judges)
    assert not verdict.failed, verdict.log
    for judge in judges:
        assert any(ran.startswith(f"tests/rtl/{judge}") for ran in verdict.ran), f"{judge}: no test"


def test_a_shipped_test_notices(fault, jury):
    verdict = jury.verdict(fault.judge, fault=fault)
    assert verdict.failed, f"{fault.judge} passes"
    assert set(verdict.failed.values()) <= NOTICES, f"{verdict.failed}\n{verdict.log}"


def test_every_module_has_faults():
    root = Path(__file__).parents[2] / "rtl"
    files = [root / "core.py", *(file for part in PARTS for file in (root / part).glob("*.py"))]
    modules = {".".join(file.relative_to(root).with_suffix("").parts) for file in files}
    modules = {module for module in modules if not module.endswith("__init__")}
    assert {fault.module for fault in FAULTS} == modules
    assert len(FAULTS) >= 60


def test_every_fault_can_be_planted():
    """Those that are not judged by default, too: what they change is still there."""
    for fault in FAULTS:
        function, code = fault.planted()
        assert code != function.__code__, fault


def test_no_fault_is_there_twice():
    names = Counter((fault.where, fault.name) for fault in FAULTS)
    changes = Counter((fault.where, fault.old, fault.new) for fault in FAULTS)
    assert max(names.values()) == max(changes.values()) == 1
