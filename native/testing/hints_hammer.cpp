// Every pattern contains the same number several times.
#include "hints_hammer.hpp"

#include <array>

namespace ringfold::hints {
namespace {

constexpr std::uint64_t reads_a_look = 1'000;
constexpr std::size_t wide_paths = 8;

// Path counts in turn; every path but the first gets the same share, and the backpressure bits repeat its lower end.
struct Pattern {
  std::array<std::uint16_t, wide_paths> shares{};
  std::uint32_t backpressure = 0;
  std::size_t paths = 0;
};

constexpr std::size_t path_counts[] = {2, 4, wide_paths, 3};

std::uint32_t mark(std::uint32_t share, std::size_t paths) {
  return (share * 2'654'435'761u >> 16) & ((1u << paths) - 1);
}

// Odd slots are always wide, so that the area is rewritten under the eyes of readers; in even ones the form changes
// too.
Pattern pattern(std::uint64_t number, std::uint32_t slot) {
  Pattern out;
  out.paths = slot % 2 == 1 ? wide_paths : path_counts[number & 3];
  // Shares that twelve bits hold exactly, so that they come back as they went in: 65535 is not a multiple of 4095.
  const auto narrow = static_cast<std::uint32_t>((number * 2'654'435'761u) % 585);
  const std::uint32_t share = (narrow * RINGFOLD_SHARE_ALL + RINGFOLD_WORD_NARROW_ALL / 2) / RINGFOLD_WORD_NARROW_ALL;
  for (std::size_t path = 1; path < out.paths; ++path) out.shares[path] = static_cast<std::uint16_t>(share);
  out.shares[0] = static_cast<std::uint16_t>(RINGFOLD_SHARE_ALL - share * (out.paths - 1));
  out.backpressure = mark(share, out.paths);
  return out;
}

bool is_whole(const ringfold_hint& hint) {
  if (hint.paths != 2 && hint.paths != 3 && hint.paths != 4 && hint.paths != wide_paths) return false;
  std::uint32_t sum = hint.shares[0];
  for (std::size_t path = 1; path < hint.paths; ++path) {
    if (hint.shares[path] != hint.shares[1]) return false;
    sum += hint.shares[path];
  }
  return sum == RINGFOLD_SHARE_ALL && hint.backpressure == mark(hint.shares[1], hint.paths);
}

}  // namespace

void hammer_writes(Writer& writer, std::uint32_t slots, std::uint64_t rounds) {
  for (std::uint64_t round = 0; rounds == 0 || round < rounds; ++round) {
    writer.linger(round % 2 == 0 ? 0 : 50);
    for (std::uint32_t slot = 0; slot < slots; ++slot) {
      const Pattern next = pattern(round * 31 + slot, slot);
      writer.publish(slot, {next.shares.data(), next.paths}, next.backpressure);
    }
    if (round % 64 == 0) writer.beat();
  }
}

Hammered hammer_reads(Reader& reader, std::uint32_t slots, std::span<const std::uint32_t> generations,
                      std::uint64_t reads) {
  if (slots == 0 || generations.size() < slots) throw std::invalid_argument("a generation for each slot is needed");
  Hammered out;
  ringfold_hint hint{};
  const std::uint64_t start = ringfold_hints_now();
  for (std::uint64_t each = 0; each < reads; ++each) {
    if (each % reads_a_look == 0) reader.look(ringfold_hints_now());
    const auto slot = static_cast<std::uint32_t>(each % slots);
    switch (reader.read(slot, generations[slot], hint)) {
      case RINGFOLD_HINT_LOCAL:
        ++out.local;
        break;
      case RINGFOLD_HINT_BUSY:
        ++out.busy;
        break;
      case RINGFOLD_HINT_READ:
        ++out.hints;
        if (!is_whole(hint)) ++out.torn;
    }
  }
  out.nanoseconds = ringfold_hints_now() - start;
  return out;
}

double read_cost_ns(Reader& reader, std::uint32_t slot, std::uint32_t generation, std::uint64_t reads) {
  reader.look(ringfold_hints_now());
  std::uint64_t sum = 0;
  const std::uint64_t start = ringfold_hints_now();
  for (std::uint64_t each = 0; each < reads; ++each) {
    const Word word = reader.read(slot, generation);
    sum += word == 0 ? 0 : ringfold_word_share(word, 1) + ringfold_word_backpressure(word);
    asm volatile("" : "+r"(sum) : : "memory");  // each read is made, and none is made out of the loop
  }
  return static_cast<double>(ringfold_hints_now() - start) / static_cast<double>(reads);
}

}  // namespace ringfold::hints
