// Which pairs of a window kept their spacing.
#include <algorithm>
#include <cmath>

#include "ringfold/probe.hpp"

namespace ringfold::probe {
namespace {

constexpr Ns min_threshold = 100;
constexpr int spreads = 6;
constexpr std::size_t fewest_kept = 20;

Ns ranked(std::vector<Ns>& values, std::size_t rank) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(std::min(rank, values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// Half of the stamps came over the network: whatever they say, nothing overflows here.
Ns spacing_change(Ns tx1, Ns rx1, Ns tx2, Ns rx2) {
  constexpr double absurd = 1e15;
  const auto about = [](Ns value) { return static_cast<double>(value); };
  const double change = (about(rx2) - about(rx1)) - (about(tx2) - about(tx1));
  if (std::abs(change) > absurd) return static_cast<Ns>(std::copysign(absurd, change));
  const auto wrapping = [](Ns value) { return static_cast<std::uint64_t>(value); };
  return static_cast<Ns>((wrapping(rx2) - wrapping(rx1)) - (wrapping(tx2) - wrapping(tx1)));
}

struct Direction {
  std::size_t tx1, rx1, tx2, rx2;
  std::uint8_t flag;
};

// Fills the flags of one direction; the threshold, or 0 without any whole pair.
Ns filter_direction(Window& window, const Direction& way, Ns gap) {
  std::vector<Ns> change;  // of the spacing, by pair
  std::vector<std::size_t> where;
  change.reserve(window.rows.size());
  where.reserve(window.rows.size());
  for (std::size_t i = 0; i < window.rows.size(); ++i) {
    const Row& row = window.rows[i];
    if (row[way.tx1] == 0 || row[way.rx1] == 0 || row[way.tx2] == 0 || row[way.rx2] == 0) continue;
    change.push_back(spacing_change(row[way.tx1], row[way.rx1], row[way.tx2], row[way.rx2]));
    where.push_back(i);
  }
  if (change.empty()) return 0;
  std::vector<Ns> scratch = change;
  const Ns centre = ranked(scratch, scratch.size() / 2);
  for (Ns& each : change) each = std::abs(each - centre);
  scratch = change;
  const Ns spread = ranked(scratch, scratch.size() / 2);
  const Ns usual = std::clamp(spreads * spread, min_threshold, std::max(gap / 5, min_threshold));
  const std::size_t must_keep = std::max(fewest_kept, change.size() / 4);
  const bool is_plenty = usual >= spread && must_keep <= change.size() / 2;  // half of all pairs are within the spread
  const Ns threshold = is_plenty ? usual : std::max(usual, ranked(scratch, must_keep - 1));
  for (std::size_t i = 0; i < change.size(); ++i) {
    if (change[i] <= threshold) {
      window.kept[where[i]] |= way.flag;
    } else {
      ++window.filtered;
    }
  }
  return threshold;
}

}  // namespace

void filter(Window& window, Ns gap) {
  window.kept.assign(window.rows.size(), 0);
  window.filtered = 0;
  const Ns forward = filter_direction(window, {0, 1, 2, 3, 1}, gap);
  window.threshold = std::max(forward, filter_direction(window, {4, 5, 6, 7, 2}, gap));
}

}  // namespace ringfold::probe
