"""Run on the golden model: numpy, no cycles, nothing to build."""

import numpy as np

from ...rtl.arch.isa import Engine
from ...rtl.arch.registers import QUEUE_STATE
from ...sim.golden import GoldenCore, GoldenDeadlock, GoldenError
from . import Fault, QueueState

__all__ = ["GoldenRunner", "missing", "start"]


def missing(config):
    """Nothing is missing: numpy is a dependency."""
    del config


def start(config, hbm, on_build=None):
    """A golden core with an HBM of that size."""
    del on_build
    return GoldenRunner(config, hbm)


class GoldenRunner:
    """See :mod:`.`; runs a :class:`GoldenCore`."""

    name = "golden"
    has_cycles = False
    build_s = 0.0

    def __init__(self, config, hbm):
        self._core: GoldenCore | None = GoldenCore(config, hbm.size_bytes)

    @property
    def core(self):
        """The model; not to be asked for after :meth:`close`."""
        assert self._core is not None
        return self._core

    def hbm_write(self, address, data):
        """Put bytes into HBM."""
        raw = np.frombuffer(data, np.uint8)
        self.core.hbm[address : address + len(raw)] = raw

    def hbm_read(self, address, size):
        """Bytes of HBM."""
        return self.core.hbm[address : address + size].tobytes()

    def run(self, queues, progress=None):
        """Run the queues; counters, as far as they need no clock."""
        report = None if progress is None else lambda done, total: progress(done, total, None)
        try:
            return dict(self.core.run(queues, progress=report))
        except GoldenError as error:
            raise Fault(
                error.code,
                source=error.source,
                field=error.field,
                pc=error.pc,
                address=error.address,
                queues=self._states(queues, error),
            ) from None

    @staticmethod
    def _states(queues, error):
        if not isinstance(error, GoldenDeadlock):
            return []
        waiting = {
            blocked.engine: QueueState(
                blocked.engine, "waiting_semaphore", blocked.issued, blocked.pc, blocked.wait,
                blocked.mode, blocked.semaphore, blocked.wanted, blocked.seen,
            )
            for blocked in error.blocked
        }  # fmt: skip
        assert "waiting_semaphore" in QUEUE_STATE
        return [
            waiting.get(Engine(engine), QueueState(Engine(engine), "done", count, base))
            for engine, (base, count) in queues.items()
        ]

    def reset(self):
        """Forget work and weights."""
        self.core.reset()

    def sbuf(self):
        """SBUF, a copy."""
        return self.core.sbuf.copy()

    def psum(self):
        """PSUM, a copy."""
        return self.core.psum.copy()

    def close(self):
        """Let go of the memories."""
        self._core = None
