// What has become of the last ops: for records of events, flight records and traces.
//
// A ring of fixed size: an op costs a copy of one entry, whether or not anybody reads it, and what nobody has read in
// time is overwritten. It belongs to the op table: see there who may touch it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ringfold/op_spec.hpp"

namespace ringfold {

// One ended op, as Python unpacks it (peer/recording.py): little-endian and without padding. Times are of
// CLOCK_MONOTONIC, 0: there is none. OpEnded in wire/events.py says what they mean.
struct OpEntry {
  std::uint64_t tag = 0, step = 0, bytes = 0, sent_bytes = 0, received_bytes = 0;
  PeerId last_peer = 0, arriving_from = 0;
  Ns called = 0, started = 0, out_first = 0, out_last = 0, in_first = 0, in_last = 0, local = 0, ended = 0, blocked = 0;
  Ns arriving = 0;
  std::uint32_t sequence = 0, epoch = 0, call = 0, attempts = 0;
  std::uint8_t kind = 0, outcome = 0, small = 0;
  std::array<std::uint8_t, 5> reserved{};
};
static_assert(sizeof(OpEntry) == 160 && std::endian::native == std::endian::little);

// Committed ops by their duration: class i is up to 16 us * 4^i, the last one is without a bound.
inline constexpr std::size_t duration_classes = 11;
inline std::size_t duration_class(Ns duration) {
  std::size_t found = 0;
  for (Ns bound = 16'000; found + 1 < duration_classes && duration > bound; bound *= 4) ++found;
  return found;
}

class OpLog {
 public:
  static constexpr std::size_t capacity = 4096;

  void add(const OpEntry& entry) {
    if (entries_.size() < capacity) entries_.push_back(entry);
    else entries_[count_ % capacity] = entry;
    ++count_;
  }
  // How many were added so far: the number of the next one.
  std::uint64_t count() const { return count_; }
  // The entries from number `from` on that are still here, oldest first.
  std::vector<OpEntry> since(std::uint64_t from) const {
    std::vector<OpEntry> out;
    from = std::max(from, count_ - entries_.size());
    if (from < count_) out.reserve(count_ - from);
    for (; from < count_; ++from) out.push_back(entries_[from % capacity]);
    return out;
  }

 private:
  std::vector<OpEntry> entries_;  // entry number i is at i % capacity
  std::uint64_t count_ = 0;
};

}  // namespace ringfold
