// Advice about the paths to a neighbour: who gives it, and what fixed shares mean over many segments.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>

#include "ringfold/part.hpp"

namespace ringfold {

// Advice about the paths to one neighbour, looked at before each segment. Without shares and flags lanes just pull.
//   weight  a path's share counts for the first few segments of an op; then a path that can take more takes more
//   fixed   the shares bind: paths carry them in bytes, over every transfer, and the slowest for its share sets the
//           pace
//   veto    a path gets nothing while another one can be counted on
struct PathShares {
  static constexpr std::uint32_t fixed = 1u << 16;  // below it: one veto bit per path
  std::array<std::uint16_t, max_paths> share{};
  std::uint32_t flags = 0;

  bool is_fixed() const { return (flags & fixed) != 0; }
  bool is_vetoed(std::size_t path) const { return (flags >> path & 1) != 0; }
  bool operator==(const PathShares&) const = default;
};

// Where advice comes from, if not from set_path_shares(). It is read before each segment, by every channel, so it must
// neither block nor throw. False: there is no advice now.
class PathHints {
 public:
  virtual ~PathHints() = default;
  virtual bool read(PeerId peer, PathShares& out) const = 0;
};

// Hints where there are any, otherwise what the program has set. Written only while no channel moves.
class ShareSources {
 public:
  void set_shares(PeerId peer, const PathShares& shares);
  void set_hints(const PathHints* hints) { hints_ = hints; }
  bool empty() const { return hints_ == nullptr && shares_.empty(); }
  bool read(PeerId peer, PathShares& out) const;

 private:
  std::map<PeerId, PathShares> shares_;
  const PathHints* hints_ = nullptr;
};

// Fixed shares of one link: what each path is behind its share, in bytes. With every segment that the link sends, each
// path that has a lane earns its share of the segment's bytes, and the path that takes it pays all of them.
class PathCredits {
 public:
  // Other shares than those before: all begin from nothing.
  double of(const PathShares& advice, std::size_t path) const { return advice.share == shares_ ? credits_[path] : 0; }
  // A path takes so many bytes. Negative: it gives them back. A path that earns nothing has no credit.
  void charge(const PathShares& advice, const std::array<bool, max_paths>& earns, std::size_t path, double bytes);
  void clear() { shares_.fill(0); }
  // What exceeds `most` is forgiven.
  void limit(double most);

 private:
  std::array<double, max_paths> credits_{};
  std::array<std::uint16_t, max_paths> shares_{};  // that the credits count for
};

}  // namespace ringfold
