// Advice about paths from the transport agent: the slot of each neighbour's flow, read at every segment.
//
// Words: a *place* is the slot and the generation that the agent gave a flow. The engine checks the file once per
// turn (`look`: is the agent alive, has a hint changed?) and reads the slot's word before each segment (`read`). An
// agent that is stale or gone, and a slot that has another owner by now, mean that there is no advice: lanes just pull.
//
// Reading is for every channel at any time, all else for when they stand still. Nothing here waits, and nothing throws
// but for want of memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "ringfold/core.hpp"
#include "ringfold/hints.hpp"

namespace ringfold {

// What a hint means for lanes. Shares are weights, or fixed if the hint says so. A path under backpressure is vetoed,
// and so is one without a share; if every path is under backpressure, they are equally bad, and only the shares count.
PathShares advice_of(const ringfold_hint& hint, std::uint32_t flags = 0);

class FollowedHints final : public PathHints {
 public:
  // The advice about the paths to `peer` is in this file at this place.
  void follow(PeerId peer, const std::string& file, std::uint32_t slot, std::uint32_t generation);
  void forget(PeerId peer);
  bool empty() const { return places_.empty(); }

  // Once per turn, while no channel moves; true when the advice may be another one than at the last look.
  bool look(Ns now);
  // By any channel.
  bool read(PeerId peer, PathShares& out) const override;

 private:
  struct Place {
    std::uint32_t slot = 0, generation = 0;
    std::optional<PathShares> seen{};  // at the last look: it counts while the agent is writing a wide one
  };
  std::optional<PathShares> read(const Place& place) const;

  std::string file_;
  std::unique_ptr<hints::Reader> reader_;
  std::map<PeerId, Place> places_;
};

}  // namespace ringfold
