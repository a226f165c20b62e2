#include "ringfold/path_shares.hpp"

#include <algorithm>

namespace ringfold {

void ShareSources::set_shares(PeerId peer, const PathShares& shares) {
  const bool none = shares.flags == 0 && shares.share == std::array<std::uint16_t, max_paths>{};
  if (none) shares_.erase(peer);
  else shares_[peer] = shares;
}

bool ShareSources::read(PeerId peer, PathShares& out) const {
  if (hints_ != nullptr && hints_->read(peer, out)) return true;
  const auto given = shares_.find(peer);
  if (given == shares_.end()) return false;
  out = given->second;
  return true;
}

void PathCredits::charge(const PathShares& advice, const std::array<bool, max_paths>& earns, std::size_t path,
                         double bytes) {
  if (shares_ != advice.share) {
    shares_ = advice.share;
    credits_.fill(0);
  }
  double whole = 0;
  for (std::size_t each = 0; each < max_paths; ++each) whole += earns[each] ? shares_[each] : 0;
  for (std::size_t each = 0; each < max_paths; ++each) {
    if (!earns[each]) credits_[each] = 0;
    else if (whole > 0) credits_[each] += shares_[each] / whole * bytes;
  }
  if (earns[path]) credits_[path] -= bytes;
}

void PathCredits::limit(double most) {
  for (double& each : credits_) each = std::clamp(each, -most, most);
}

}  // namespace ringfold
