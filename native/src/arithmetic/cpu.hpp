// Which code this CPU runs: one Level bundles the kernels, the quantisers, the CRC and the hash that belong together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hash_lanes.hpp"
#include "kernels_table.hpp"
#include "quantize_table.hpp"

namespace ringfold {

// Continues a CRC register (not inverted) over more bytes.
using CrcExtend = uint32_t (*)(uint32_t state, const uint8_t* bytes, size_t count);

struct Level {
  const char* name;
  const kernels::Table* kernels;
  const quantize::Table* quantize;
  CrcExtend crc;
  hash::Absorb hash;
};

// The level in use; detected on the first call.
const Level& active_level();

}  // namespace ringfold
