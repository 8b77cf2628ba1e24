"""Reusable hardware that knows nothing of the core: streams, memories, AXI bundles, selection."""
