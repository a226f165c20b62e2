// CRC-32C (Castagnoli, as in iSCSI and RFC 3720): the checksum in every data frame.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringfold {

// crc32c("123456789") == 0xE3069283. Chains: crc32c(b, n, crc32c(a, m)) is the checksum of a followed by b.
uint32_t crc32c(const void* bytes, size_t count, uint32_t seed = 0);

// The checksum of a followed by b from the checksums of both, without the bytes; the time grows with log(bytes_b).
uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, size_t bytes_b);

}  // namespace ringfold
