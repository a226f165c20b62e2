// rf64: the CPU levels agree, and messages that differ a little have hashes that differ as if drawn at random.
//
// "As if drawn at random" is more than "differ": among N random 64-bit numbers about N^2 / 2^33 pairs agree in their
// upper 32 bits, and as many in the lower. A hash that only almost collides shows up as more of those.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "ringfold/hash.hpp"
#include "ringfold/kernels.hpp"

using namespace ringfold;
using Bytes = std::vector<uint8_t>;

namespace {

// xorshift64*: the same numbers on every machine.
struct Random {
  uint64_t state = 0x9e3779b97f4a7c15;
  uint64_t next() {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 0x2545f4914f6cdd1d;
  }
};

Bytes random_bytes(size_t count) {
  Random random;
  Bytes bytes(count);
  for (uint8_t& each : bytes) each = static_cast<uint8_t>(random.next() >> 56);
  return bytes;
}

uint64_t hash(const Bytes& bytes) { return hash_block(bytes.data(), bytes.size()); }

void flip(Bytes& bytes, size_t bit) { bytes[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8)); }

template <class T>
void put(Bytes& bytes, size_t index, T value) {
  std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
}

size_t equal_pairs(std::vector<uint64_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  size_t pairs = 0, run = 0;
  for (size_t i = 1; i < numbers.size(); ++i) {
    run = numbers[i] == numbers[i - 1] ? run + 1 : 0;
    pairs += run;
  }
  return pairs;
}

void check_spread(const char* family, const std::vector<uint64_t>& hashes) {
  CHECK_MESSAGE(equal_pairs(hashes) == 0, "%s: %zu pairs collide", family, equal_pairs(hashes));
  const double expected = std::pow(static_cast<double>(hashes.size()), 2) / std::pow(2.0, 33);
  const double most = expected + 6 * std::sqrt(expected) + 6;
  for (const int shift : {0, 16, 32}) {
    std::vector<uint64_t> halves;
    for (const uint64_t each : hashes) halves.push_back(each >> shift & 0xffffffff);
    const size_t pairs = equal_pairs(std::move(halves));
    CHECK_MESSAGE(static_cast<double>(pairs) <= most,
                  "%s: %zu hashes have %zu pairs that agree in 32 bits from bit %d, not about %.0f", family,
                  hashes.size(), pairs, shift, expected);
  }
}

// ---- The levels

TEST(levels_agree) {
  const Bytes bytes = random_bytes(3 * 16384 + 64);
  std::vector<size_t> lengths;
  for (size_t i = 0; i <= 600; ++i) lengths.push_back(i);
  for (const size_t edge : {16384u, 2 * 16384u, 3 * 16384u})
    for (const size_t length : {edge - 257, edge - 256, edge - 1, edge, edge + 1, edge + 63}) lengths.push_back(length);
  std::vector<uint64_t> wanted;
  for (const char* level : {"generic", "avx2", "avx512"}) {
    if (!kernels::set_cpu_level(level)) continue;
    std::vector<uint64_t> got;
    for (const size_t length : lengths)
      for (const size_t offset : {0u, 1u})
        got.push_back(hash_block(bytes.data() + offset, std::min(length, bytes.size() - 1)));
    if (wanted.empty()) wanted = got;
    for (size_t i = 0; i < got.size(); ++i)
      CHECK_MESSAGE(got[i] == wanted[i], "%s: %zu bytes at %zu", level, lengths[i / 2], i % 2);
  }
}

// ---- Small differences

TEST(every_bit_counts) {
  for (const size_t length : {1u, 8u, 255u, 256u, 257u, 16384u + 300u}) {
    Bytes bytes = random_bytes(length);
    std::vector<uint64_t> hashes{hash(bytes)};
    for (size_t bit = 0; bit < 8 * length; ++bit) {
      flip(bytes, bit);
      hashes.push_back(hash(bytes));
      flip(bytes, bit);
    }
    check_spread("one bit flipped", hashes);
  }
}

TEST(two_bits_count) {
  for (const bool random : {false, true}) {
    Bytes bytes = random ? random_bytes(1024) : Bytes(1024);
    std::vector<uint64_t> hashes;
    // Bits of words that meet in a lane (256 bytes apart), and of words that do not.
    std::vector<size_t> bits;
    for (const size_t word : {0u, 1u, 31u, 32u, 33u, 64u, 96u, 127u})
      for (size_t bit = 0; bit < 64; ++bit) bits.push_back(64 * word + bit);
    for (size_t i = 0; i < bits.size(); ++i)
      for (size_t j = 0; j < i; ++j) {
        flip(bytes, bits[i]), flip(bytes, bits[j]);
        hashes.push_back(hash(bytes));
        flip(bytes, bits[i]), flip(bytes, bits[j]);
      }
    check_spread(random ? "two bits flipped" : "two bits in zeros", hashes);
  }
}

// What another order of additions does to a model: here one up, there one down.
TEST(opposite_roundings_count) {
  constexpr size_t count = 768;
  const Bytes noise = random_bytes(4 * count);
  std::vector<uint32_t> weights(count);
  for (size_t i = 0; i < count; ++i) weights[i] = 0x3f800000 + noise[4 * i] * 257u;
  Bytes bytes(4 * count);
  for (size_t i = 0; i < count; ++i) put(bytes, i, weights[i]);
  std::vector<uint64_t> hashes{hash(bytes)};
  for (size_t i = 0; i < count; ++i) {
    put(bytes, i, weights[i] + 1);
    for (size_t j = 0; j < count; ++j) {
      if (i == j) continue;
      put(bytes, j, weights[j] - 1);
      hashes.push_back(hash(bytes));
      put(bytes, j, weights[j]);
    }
    put(bytes, i, weights[i]);
  }
  check_spread("one weight up, another down", hashes);
}

TEST(order_counts) {
  constexpr size_t words = 512;
  for (const uint64_t factor : {uint64_t{1}, uint64_t{0x0001000000000000}, uint64_t{0xc97c50dd3f84d5b5}}) {
    Bytes bytes(8 * words);
    for (uint64_t i = 0; i < words; ++i) put(bytes, i, i * factor);
    std::vector<uint64_t> hashes{hash(bytes)};
    for (uint64_t i = 0; i < words; ++i)
      for (uint64_t j = 0; j < i; ++j) {
        put(bytes, i, j * factor), put(bytes, j, i * factor);
        hashes.push_back(hash(bytes));
        put(bytes, i, i * factor), put(bytes, j, j * factor);
      }
    check_spread("two words swapped", hashes);
  }
}

TEST(swapped_twice_counts) {
  // x y ... y x against y x ... x y: every sum over the words weighted by their places is the same.
  constexpr size_t words = 128;
  std::vector<uint64_t> hashes;
  for (size_t i = 0; i + 1 < words; ++i)
    for (size_t j = i + 2; j + 1 < words; ++j)
      for (const uint64_t here : {0u, 1u}) {
        Bytes bytes(8 * words);
        for (size_t k = 0; k < words; ++k) put(bytes, k, uint64_t{2} + k);
        put(bytes, i, here), put(bytes, i + 1, 1 - here), put(bytes, j, 1 - here), put(bytes, j + 1, here);
        hashes.push_back(hash(bytes));
      }
  check_spread("a swap and its reverse", hashes);
}

TEST(length_counts) {
  for (const uint8_t fill : {0x00, 0xff}) {
    const Bytes bytes(20'000, fill);
    std::vector<uint64_t> hashes;
    for (size_t length = 0; length <= bytes.size(); ++length) hashes.push_back(hash_block(bytes.data(), length));
    check_spread("runs of one byte", hashes);
  }
}

TEST(small_numbers_count) {
  Bytes bytes(4 * 8);
  std::vector<uint64_t> hashes;
  for (uint64_t i = 0; i < 1'000'000; ++i) {
    put(bytes, 0, i % 100), put(bytes, 1, i / 100 % 100), put(bytes, 2, i / 10'000);
    hashes.push_back(hash(bytes));
  }
  check_spread("small numbers", hashes);
}

TEST(one_bit_moves_half_of_the_hash) {
  constexpr size_t length = 40, trials = 4000;
  Random random;
  std::vector<size_t> moved(8 * length * 64);
  for (size_t t = 0; t < trials; ++t) {
    Bytes bytes(length);
    for (uint8_t& each : bytes) each = static_cast<uint8_t>(random.next() >> 56);
    const uint64_t before = hash(bytes);
    for (size_t bit = 0; bit < 8 * length; ++bit) {
      flip(bytes, bit);
      const uint64_t changed = hash(bytes) ^ before;
      flip(bytes, bit);
      for (size_t out = 0; out < 64; ++out) moved[64 * bit + out] += changed >> out & 1;
    }
  }
  // 20,480 pairs of an input and an output bit; six standard deviations off is no chance any more.
  const double deviation = std::sqrt(trials) / 2;
  for (size_t i = 0; i < moved.size(); ++i)
    CHECK_MESSAGE(std::abs(static_cast<double>(moved[i]) - trials / 2.0) < 6 * deviation,
                  "bit %zu moves bit %zu %zu times of %zu", i / 64, i % 64, moved[i], trials);
}

// ---- Blocks and roots

TEST(threads_change_nothing) {
  const size_t length = 17 * hash_block_bytes + 5;
  Bytes bytes(length);
  for (size_t i = 0; i < length; i += 4096) bytes[i] = static_cast<uint8_t>(i >> 12);
  std::vector<uint64_t> wanted;
  for (size_t from = 0; from < length; from += hash_block_bytes)
    wanted.push_back(hash_block(bytes.data() + from, std::min(hash_block_bytes, length - from)));
  for (const unsigned threads : {0u, 1u, 2u, 3u, 64u}) {
    std::vector<uint64_t> got(hash_block_count(length));
    hash_blocks(bytes.data(), length, got.data(), threads);
    CHECK_MESSAGE(got == wanted, "with %u threads", threads);
  }
}

TEST(a_root_covers_order_number_and_size) {
  const uint64_t blocks[] = {1, 2}, reversed[] = {2, 1}, more[] = {1, 2, 0};
  const uint64_t root = hash_root(blocks, sizeof blocks, hash_block_bytes + 1);
  CHECK(root != hash_root(reversed, sizeof reversed, hash_block_bytes + 1));
  CHECK(root != hash_root(blocks, sizeof blocks, hash_block_bytes + 2));
  CHECK(root != hash_root(more, sizeof more, hash_block_bytes + 1));
  const uint64_t with_size[] = {1, 2, hash_block_bytes + 1};
  CHECK(root != hash_block(with_size, sizeof with_size));
  CHECK(hash_root(nullptr, 0, 0) != hash_block(nullptr, 0));
}

}  // namespace
