// The installed epoch, as the core and its channels read it.
//
// An op runs in the installed epoch. After seal() no Done leaves and no evidence counts, until every op has been
// settled and install() begins the next epoch. Both are written only while no channel moves: to a channel it is a
// constant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ringfold/op_spec.hpp"

namespace ringfold {

inline constexpr std::uint32_t max_channels = 16;

struct EpochSpec {
  std::uint32_t epoch = 0;
  std::uint32_t rank = 0;
  std::uint32_t size = 0;
  std::vector<PeerId> members;
  bool evidence_by_master = false;
  std::size_t small_bytes = 0;
  std::size_t segment_bytes = 0;
  std::uint32_t peers_here = 1;  // members on this host
  bool multipath = false;        // some link has several lanes: ops are cut finely
  std::uint32_t channels = 1;    // that carry ops
  bool direct = false;           // Dones go straight to every member that a direct lane leads to
  std::uint32_t hosts = 1;       // above 1: so many, with the same number of members each, one after the other in the
                                 // ring; ops are reduced inside each host first (plan_hosts)
};

class EpochState {
 public:
  const EpochSpec& spec() const { return spec_; }
  std::uint32_t number() const { return spec_.epoch; }  // 0: none yet
  std::uint32_t rank() const { return spec_.rank; }
  std::uint32_t size() const { return spec_.size; }
  bool is_sealed() const { return sealed_; }

  void seal() { sealed_ = true; }
  void install(EpochSpec spec);

  PeerId neighbour(bool next) const { return spec_.members[(spec_.rank + (next ? 1 : spec_.size - 1)) % spec_.size]; }
  // How many sides there are, and the rank at each. A ring of two has the same rank at both.
  std::uint32_t sides() const { return static_cast<std::uint32_t>(ranks_.size()); }
  std::uint32_t rank_at(Side side) const { return ranks_[side]; }
  PeerId peer_at(Side side) const { return spec_.members[ranks_[side]]; }
  // The side of a member by the lane that leads to it: `outgoing` or not in the ring, or direct. no_side: none.
  Side side_of(PeerId peer, bool outgoing, bool direct) const;

  // The longest payload of a frame.
  std::size_t frame_limit() const;
  // How many bytes of early segments a neighbour stores for each direction of a channel, over all ops together. Sender
  // and receiver compute it alike. See Channel.
  std::size_t early_limit() const;

  // How far a frame of rank `origin` has come, and how far it goes, in hops: what all ranks must know travels in both
  // directions around the ring and stops half-way, where the frame from the other side has been.
  struct Journey {
    std::uint32_t travelled, reach;
  };
  Journey journey(std::uint32_t origin, bool from_next) const;

 private:
  EpochSpec spec_;
  std::vector<std::uint32_t> ranks_;  // by side
  bool sealed_ = true;
};

}  // namespace ringfold
