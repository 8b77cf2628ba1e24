"""On-chip memories: SBUF (scratchpad) and PSUM (accumulator)."""
