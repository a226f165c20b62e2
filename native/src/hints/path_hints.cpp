#include "ringfold/path_hints.hpp"

#include <algorithm>

namespace ringfold {

static_assert(max_paths == RINGFOLD_HINTS_MOST_PATHS, "a hint has a share for every path of a link");

PathShares advice_of(const ringfold_hint& hint, std::uint32_t flags) {
  PathShares out;
  const std::uint32_t paths = std::min<std::uint32_t>(hint.paths, max_paths);
  const std::uint32_t all = (1u << paths) - 1;
  std::uint32_t without = 0;
  for (std::uint32_t path = 0; path < paths; ++path) {
    out.share[path] = hint.shares[path];
    if (hint.shares[path] == 0) without |= 1u << path;
  }
  const std::uint32_t held = hint.backpressure & all;
  out.flags = without | (held == all ? 0 : held);
  if ((flags & RINGFOLD_HINT_FIXED) != 0) out.flags |= PathShares::fixed;
  return out;
}

void FollowedHints::follow(PeerId peer, const std::string& file, std::uint32_t slot, std::uint32_t generation) {
  if (reader_ == nullptr || file != file_) {
    reader_ = std::make_unique<hints::Reader>(file);
    file_ = file;
  }
  Place place;
  place.slot = slot;
  place.generation = generation;
  places_[peer] = place;
}

void FollowedHints::forget(PeerId peer) { places_.erase(peer); }

bool FollowedHints::look(Ns now) {
  if (places_.empty()) return false;
  reader_->look(static_cast<std::uint64_t>(now));
  bool changed = false;
  for (auto& [peer, place] : places_) {
    PathShares found;
    const bool has = read(place, found);
    if (has == place.has_seen && found.flags == place.seen.flags && found.share == place.seen.share) continue;
    place.has_seen = has;
    place.seen = found;
    changed = true;
  }
  return changed;
}

bool FollowedHints::read(PeerId peer, PathShares& out) const {
  const auto it = places_.find(peer);
  return it != places_.end() && read(it->second, out);
}

bool FollowedHints::read(const Place& place, PathShares& out) const {
  const auto result = reader_->read(place.slot, place.generation, place.hint);
  if (result != RINGFOLD_HINT_BUSY) {
    place.has_hint = result == RINGFOLD_HINT_READ;
    place.flags = reader_->flags(place.slot);
  }
  if (place.has_hint) out = advice_of(place.hint, place.flags);
  return place.has_hint;
}

}  // namespace ringfold
