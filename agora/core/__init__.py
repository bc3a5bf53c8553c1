"""Ground floor: clocks, threads, rates, the interface of a call, metrics."""
