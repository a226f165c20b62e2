"""Units. Times are integer nanoseconds, and sizes are bytes: `250 * MS`, `64 * MIB`."""

US = 1_000
MS = 1_000_000
S = 1_000_000_000

KIB = 1 << 10
MIB = 1 << 20
