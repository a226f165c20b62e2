#include "ringfold/epoch_state.hpp"

#include <algorithm>
#include <utility>

namespace ringfold {

void EpochState::install(EpochSpec spec) {
  spec_ = std::move(spec);
  spec_.segment_bytes = std::max<std::size_t>((spec_.segment_bytes + 63) / 64 * 64, 64);
  spec_.channels = std::clamp(spec_.channels, std::uint32_t{1}, max_channels);
  const std::uint32_t n = spec_.size;
  ranks_.clear();
  if (n > 1) ranks_ = {(spec_.rank + n - 1) % n, (spec_.rank + 1) % n};
  for (std::uint32_t rank = 0; rank < n && n > 1; ++rank) {
    if (rank != spec_.rank && rank != ranks_[previous_side] && rank != ranks_[next_side]) ranks_.push_back(rank);
  }
  sealed_ = false;
}

Side EpochState::side_of(PeerId peer, bool outgoing, bool direct) const {
  if (ranks_.empty()) return no_side;
  if (!direct) return peer_at(outgoing ? next_side : previous_side) == peer ? Side{outgoing} : no_side;
  for (Side side = first_direct_side; side < sides(); ++side) {
    if (peer_at(side) == peer) return side;
  }
  return no_side;
}

std::size_t EpochState::frame_limit() const {
  return std::max({spec_.segment_bytes, spec_.small_bytes, sizeof(Descriptor)});
}

std::size_t EpochState::early_limit() const {
  constexpr std::size_t most = std::size_t{64} << 20, segments = 64, min_segments = 4;
  return std::max(std::min(segments * frame_limit(), most) / spec_.channels, min_segments * frame_limit());
}

EpochState::Journey EpochState::journey(std::uint32_t origin, bool from_next) const {
  const std::uint32_t n = spec_.size;
  const std::uint32_t travelled = from_next ? (origin + n - spec_.rank) % n : (spec_.rank + n - origin) % n;
  return {travelled, from_next ? (n - 1) / 2 : n / 2};
}

}  // namespace ringfold
