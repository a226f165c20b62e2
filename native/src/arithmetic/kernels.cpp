// The public kernels: pick the level's loops, and walk a segment block by block so that its passes meet in L1.

#include "ringfold/kernels.hpp"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cpu.hpp"

namespace ringfold::kernels {

namespace {

// Target and b of one block together fill half of a 32 KiB L1.
constexpr size_t block_bytes = 8 * 1024;

// How much is summed up between two bursts of prefetches: a burst must fit the CPU's few outstanding cache misses.
constexpr size_t slice_bytes = 2 * 1024;

// overwrite() only copies; turning around less often is worth more than room in L1.
constexpr size_t copy_block_bytes = 16 * 1024;

void cached_copy(void* target, const void* source, size_t bytes) { std::memcpy(target, source, bytes); }

// Streaming stores are not ordered with the stores after them: another thread may restore from the backup.
void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// The checksum is the one pass that does not wait for memory: meanwhile the next block is prefetched.
uint32_t crc_while_fetching(CrcExtend extend, uint32_t state, const uint8_t* block, size_t size, const uint8_t* next,
                            size_t next_size) {
  for (size_t at = 0; at < size; at += slice_bytes) {
    for (size_t line = at; line < std::min(at + slice_bytes, next_size); line += 64) __builtin_prefetch(next + line);
    state = extend(state, block + at, std::min(slice_bytes, size - at));
  }
  return state;
}

size_t index(DType dtype) { return static_cast<size_t>(dtype); }
size_t index(ReduceOp op) { return static_cast<size_t>(op); }

}  // namespace

size_t item_bytes(DType dtype) {
  constexpr uint8_t bytes[dtype_count] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
  return bytes[index(dtype)];
}

void reduce(DType dtype, ReduceOp op, void* target, const void* a, const void* b, size_t count) {
  active_level().kernels->reduce[index(dtype)][index(op)](target, a, b, count);
}

void divide(DType dtype, void* target, uint32_t divisor, size_t count) {
  if (divisor > 1) active_level().kernels->divide[index(dtype)](target, divisor, count);
}

uint32_t reduce_step(DType dtype, ReduceOp op, void* target, const void* a, const void* b, size_t count, Backup backup,
                     uint32_t divisor, bool want_crc, bool b_first) {
  const Level& level = active_level();
  const ReduceKernel reduce_block = level.kernels->reduce[index(dtype)][index(op)];
  const DivideKernel divide_block = level.kernels->divide[index(dtype)];
  const size_t item = item_bytes(dtype);
  const size_t bytes = count * item;
  const bool stream = backup.at != nullptr && backup.past_cache;
  const CopyKernel save = stream ? level.kernels->stream_copy : cached_copy;
  auto* t = static_cast<uint8_t*>(target);
  const auto* x = static_cast<const uint8_t*>(a);
  const auto* y = static_cast<const uint8_t*>(b);
  auto* saved = static_cast<uint8_t*>(backup.at);

  uint32_t state = ~0u;
  for (size_t at = 0; at < bytes; at += block_bytes) {
    const size_t size = std::min(block_bytes, bytes - at);
    if (saved != nullptr) save(saved + at, x + at, size);
    const uint8_t* first = b_first ? y : x;
    const uint8_t* second = b_first ? x : y;
    reduce_block(t + at, first + at, second + at, size / item);
    if (divisor > 1) divide_block(t + at, divisor, size / item);
    if (want_crc) {
      const size_t next_size = std::min(block_bytes, bytes - at - size);
      state = crc_while_fetching(level.crc, state, t + at, size, x + at + size, next_size);
    }
  }
  if (stream) stream_fence();
  return want_crc ? ~state : 0;
}

void overwrite(void* target, const void* source, size_t bytes, Backup backup, bool past_cache) {
  if (bytes == 0) return;
  const CopyKernel stream_copy = active_level().kernels->stream_copy;
  const CopyKernel save = backup.past_cache ? stream_copy : cached_copy;
  const CopyKernel write = past_cache ? stream_copy : cached_copy;
  auto* t = static_cast<uint8_t*>(target);
  const auto* s = static_cast<const uint8_t*>(source);
  auto* saved = static_cast<uint8_t*>(backup.at);
  for (size_t at = 0; at < bytes; at += copy_block_bytes) {
    const size_t size = std::min(copy_block_bytes, bytes - at);
    if (saved != nullptr) save(saved + at, t + at, size);
    write(t + at, s + at, size);
  }
  if (past_cache || (saved != nullptr && backup.past_cache)) stream_fence();
}

}  // namespace ringfold::kernels
