#if defined(__x86_64__)
#define RINGFOLD_LEVEL avx2
#include "kernels_level.inc"
#endif
