// The tree of rf64 around the inner loop of hash_lanes.hpp.
//
// A message is cut into tiles of 64 rows. Each tile starts from the same states, so that a GPU can work on all tiles at
// once, and ends as 32 states, which are one row for an outer set of states. When all tiles are absorbed, the outer
// states are scattered one by one and added up with the length: a sum needs no order, and a changed state always
// changes it.

#include "ringfold/hash.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu.hpp"
#include "hash_lanes.hpp"

namespace ringfold {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

namespace hash {

namespace {

constexpr size_t tile_bytes = 64 * row_bytes;
constexpr uint64_t stride = 0x9216d5d98979fb1b;

// A permutation of the 64-bit numbers in which every bit of the input moves every bit of the output.
constexpr uint64_t scatter(uint64_t x) {
  x = (x ^ (x >> 32)) * 0xbe5466cf34e90c6d;
  x = (x ^ (x >> 29)) * 0xc97c50dd3f84d5b5;
  return x ^ (x >> 32);
}

constexpr uint64_t key(uint64_t number) { return scatter((number + 1) * stride); }

struct alignas(64) States {
  std::array<uint64_t, lanes> lane;
};

constexpr States keys_from(uint64_t number) {
  States states{};
  for (size_t i = 0; i < lanes; ++i) states.lane[i] = key(number + i);
  return states;
}

constexpr States tile_start = keys_from(0);
constexpr States outer_start = keys_from(lanes);
constexpr States final_keys = keys_from(2 * lanes);
constexpr uint64_t block_key = key(3 * lanes);
constexpr uint64_t root_key = key(3 * lanes + 1);

States tile(Absorb absorb, const uint8_t* bytes, size_t count) {
  States states = tile_start;
  const size_t whole = count / row_bytes, rest = count % row_bytes;
  absorb(states.lane.data(), bytes, whole);
  if (rest != 0) {
    uint8_t padded[row_bytes] = {};
    std::memcpy(padded, bytes + whole * row_bytes, rest);
    absorb(states.lane.data(), padded, 1);
  }
  return states;
}

uint64_t message(const uint8_t* bytes, size_t count, uint64_t purpose) {
  const Absorb absorb = active_level().hash;
  uint64_t sum = count * stride + purpose;
  States outer = outer_start;
  while (count != 0) {
    const size_t here = std::min(count, tile_bytes);
    const States inner = tile(absorb, bytes, here);
    absorb(outer.lane.data(), reinterpret_cast<const uint8_t*>(inner.lane.data()), 1);
    bytes += here, count -= here;
  }
  for (size_t i = 0; i < lanes; ++i) sum += scatter(outer.lane[i] ^ final_keys.lane[i]);
  return scatter(sum);
}

}  // namespace

void absorb_generic(uint64_t* states, const uint8_t* rows, size_t count) {
  for (; count != 0; --count, rows += row_bytes) {
    for (size_t i = 0; i < lanes; ++i) {
      uint64_t word;
      std::memcpy(&word, rows + 8 * i, 8);
      uint64_t x = states[i] ^ word;
      x += (x & 0xffffffff) * first;
      x = std::rotl(x, 32);
      states[i] = x + (x & 0xffffffff) * second;
    }
  }
}

}  // namespace hash

uint64_t hash_block(const void* bytes, size_t count) {
  return hash::message(static_cast<const uint8_t*>(bytes), count, hash::block_key);
}

uint64_t hash_root(const void* hashes, size_t count, uint64_t total_bytes) {
  std::vector<uint8_t> message(count + sizeof total_bytes);
  if (count != 0) std::memcpy(message.data(), hashes, count);
  std::memcpy(message.data() + count, &total_bytes, sizeof total_bytes);
  return hash::message(message.data(), message.size(), hash::root_key);
}

void hash_blocks(const void* bytes, size_t count, uint64_t* out, unsigned threads) {
  constexpr size_t blocks_per_thread = 4;  // starting a thread takes about as long as hashing one block
  const size_t blocks = hash_block_count(count);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
      const size_t from = i * hash_block_bytes;
      out[i] = hash_block(static_cast<const uint8_t*>(bytes) + from, std::min(hash_block_bytes, count - from));
    }
  };
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  const size_t useful = std::min<size_t>(threads, blocks / blocks_per_thread);
  std::vector<std::jthread> others;
  try {
    while (others.size() + 1 < useful) others.emplace_back(work);
  } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
    // No more threads to be had: those that run, and this one, do it all.
  }
  work();
}

}  // namespace ringfold
