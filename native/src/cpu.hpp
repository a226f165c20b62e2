// Which code this CPU runs: one Level bundles the kernels and the CRC that belong together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels_table.hpp"

namespace ringfold {

// Continues a CRC register (not inverted) over more bytes.
using CrcExtend = uint32_t (*)(uint32_t state, const uint8_t* bytes, size_t count);

struct Level {
    const char* name;
    const kernels::Table* kernels;
    CrcExtend crc;
};

// The level in use; detected on the first call.
const Level& active_level();

}  // namespace ringfold
