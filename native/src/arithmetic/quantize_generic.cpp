// The level every CPU has.
#define RINGFOLD_LEVEL generic
#include "quantize_level.inc"
