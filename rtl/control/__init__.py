"""Instruction fetch, queues, checking, semaphores, host registers and counters."""
