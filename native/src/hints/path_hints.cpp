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
    const auto found = read(place);
    changed |= found != place.seen;
    place.seen = found;
  }
  return changed;
}

bool FollowedHints::read(PeerId peer, PathShares& out) const {
  const auto it = places_.find(peer);
  const auto found = it == places_.end() ? std::nullopt : read(it->second);
  if (found) out = *found;
  return found.has_value();
}

std::optional<PathShares> FollowedHints::read(const Place& place) const {
  ringfold_hint hint;
  const auto result = reader_->read(place.slot, place.generation, hint);
  if (result == RINGFOLD_HINT_BUSY) return place.seen;
  if (result != RINGFOLD_HINT_READ) return std::nullopt;
  return advice_of(hint, reader_->flags(place.slot));
}

}  // namespace ringfold
