#if defined(__x86_64__)
#define RINGFOLD_LEVEL avx512
#include "quantize_level.inc"
#endif
