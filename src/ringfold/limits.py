"""Limits that several packages enforce, each defined once. A test compares some of them with the native core."""

MAX_PATHS = 16
"""Paths of a link: of the addresses that a peer advertises, of a flow, and of the slots of the agent's hints."""
MAX_CHANNELS = 16
"""Slices that an op is cut into, each with lanes of its own."""
MAX_LANES_OF_A_PATH = 256
"""Of all channels together."""
MAX_TIMEOUT_S = 1e9
"""About 30 years: more is infinite, which no clock can add."""
MAX_KEYS = 100_000
"""Arrays of a shared state."""
