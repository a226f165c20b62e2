// rf64, the hash of shared state: 64 bits per block of 1 MiB, and a root over the blocks' hashes.
//
// docs/reference/hash.md defines it bit by bit. It finds differences that happen by themselves (a lost update, another
// order of additions, a flipped bit); it does not resist an attacker that searches for a collision.
//
// Pointers need no alignment. All CPU levels give the same numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringfold {

inline constexpr size_t hash_block_bytes = size_t{1} << 20;

constexpr size_t hash_block_count(size_t bytes) { return bytes / hash_block_bytes + (bytes % hash_block_bytes != 0); }

// The hash of one block. A block has at most hash_block_bytes; longer ones are hashed too, without being split.
uint64_t hash_block(const void* bytes, size_t count);

// Writes the hashes of all blocks of an array to `out`, which has room for hash_block_count(count).
// Works on `threads` threads, this one among them; 0 means as many as there are cores. Few bytes get fewer threads.
void hash_blocks(const void* bytes, size_t count, uint64_t* out, unsigned threads);

// The hash of an array of `total_bytes` from its blocks' hashes, 8 bytes each. An empty array has no blocks, and a
// root. Hashes that are too many or too few for the array are no error: they give another root.
uint64_t hash_root(const void* hashes, size_t count, uint64_t total_bytes);

}  // namespace ringfold
