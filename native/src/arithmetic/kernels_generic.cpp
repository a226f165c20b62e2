// The level every CPU has. On x86-64 that is SSE2, on aarch64 NEON.
#define RINGFOLD_LEVEL generic
#include "kernels_level.inc"
