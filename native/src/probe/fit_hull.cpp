// The corridor between the two sides.
//
// Take a slope a. The highest line of that slope below all upper points has the height U(a) = min(u_i - a x_i) at x =
// 0, the lowest one above all lower points L(a) = max(l_j - a x_j). Only vertices of the convex hulls ever decide. U is
// concave and L is convex, both are straight between the slopes of the hulls' sides; so G = U - L, the gap, is concave
// and straight between those slopes, and one walk over them in order finds all there is to know:
//
//   the slope of the largest gap             where G turns from rising to falling
//   the steepest and the flattest line       the two roots of G
//
// At another place x* the same holds with x - x* for x: the highest value of any line of the corridor at x* is the
// maximum of U over the slopes between the roots. In the middle of the window that is a point of the hull unless the
// slope there is outside; then it is the value at the nearer root.
//
// Why the vertical gap: the Euclidean margin between two sets depends on the units of the axes, the vertical one does
// not.

#include <algorithm>
#include <cmath>
#include <limits>

#include "fit_parts.hpp"

namespace ringfold::fitting {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// The lower convex hull of an upright side, from left to right. Of points with the same x the lowest counts.
std::vector<std::size_t> hull(const Side& side) {
  std::vector<std::size_t> kept;
  for (std::size_t i = 0; i < side.size(); ++i) {
    if (!kept.empty() && side.x[kept.back()] == side.x[i]) {
      if (side.y[kept.back()] <= side.y[i]) continue;
      kept.pop_back();
    }
    while (kept.size() >= 2) {
      const std::size_t a = kept[kept.size() - 2], b = kept.back();
      const double turn =
          (side.x[b] - side.x[a]) * (side.y[i] - side.y[a]) - (side.y[b] - side.y[a]) * (side.x[i] - side.x[a]);
      if (turn > 0) break;
      kept.pop_back();
    }
    kept.push_back(i);
  }
  return kept;
}

// The floor of one side as a function of the line's slope: the height at `at` of an upright line of slope `sign * a`
// that touches the hull from below. The hull's sides get steeper from left to right, so a search finds the vertex that
// is touched.
class Floor {
 public:
  Floor(const Side& side, const std::vector<std::size_t>& hull) : side_(side), hull_(hull) {
    for (std::size_t k = 0; k + 1 < hull.size(); ++k)
      steepness_.push_back((side.y[hull[k + 1]] - side.y[hull[k]]) / (side.x[hull[k + 1]] - side.x[hull[k]]));
  }

  double height(double a, double at = 0) const {
    const double upright = side_.sign * a;
    const auto turn = std::lower_bound(steepness_.begin(), steepness_.end(), upright);
    const std::size_t i = hull_[static_cast<std::size_t>(turn - steepness_.begin())];
    return side_.y[i] - upright * (side_.x[i] - at);
  }

  // Slopes `a` at which the touched vertex changes.
  void add_turns(std::vector<double>& turns) const {
    for (const double each : steepness_) turns.push_back(side_.sign * each);
  }

  // The highest floor at `at` with a slope from `lowest` to `highest`: along the hull's side there, if that is not too
  // steep.
  double highest_at(double at, double lowest, double highest) const {
    const auto right =
        std::lower_bound(hull_.begin(), hull_.end(), at, [&](std::size_t i, double x) { return side_.x[i] < x; });
    const auto k = static_cast<std::size_t>(right - hull_.begin());
    const double upright = k == 0 ? -infinity : k == hull_.size() ? infinity : steepness_[k - 1];
    return height(std::clamp(side_.sign * upright, lowest, highest), at);
  }

 private:
  const Side& side_;
  const std::vector<std::size_t>& hull_;
  std::vector<double> steepness_;
};

// Where the gap, falling from `inside` (>= 0) to beyond the last turn, reaches 0. The gap is straight outside of all
// turns.
double root(const std::vector<double>& slopes, const std::vector<double>& gaps, std::size_t best, int step,
            double steepness) {
  std::size_t i = best;
  while (true) {
    const std::size_t next = i + static_cast<std::size_t>(step);
    if (next >= slopes.size()) return slopes[i] + step * gaps[i] / steepness;
    if (gaps[next] < 0) return slopes[i] + (slopes[next] - slopes[i]) * gaps[i] / (gaps[i] - gaps[next]);
    i = next;
  }
}

}  // namespace

Corridor corridor(const Side& upper, const Side& lower) {
  Corridor found;
  found.upper_hull = hull(upper);
  found.lower_hull = hull(lower);
  // Beyond all turns one end of each side decides, and the gap falls by the time that they overlap.
  const double falling = upper.x.back() - lower.x.front(), rising = lower.x.back() - upper.x.front();
  found.overlap = falling > 0 && rising > 0;
  if (!found.overlap) return found;

  const Floor above(upper, found.upper_hull), below(lower, found.lower_hull);
  std::vector<double> slopes, gaps;
  above.add_turns(slopes);
  below.add_turns(slopes);
  if (slopes.empty()) slopes.push_back(0);
  std::sort(slopes.begin(), slopes.end());
  gaps.reserve(slopes.size());
  for (const double a : slopes) gaps.push_back(above.height(a) + below.height(a));
  const auto best = static_cast<std::size_t>(std::max_element(gaps.begin(), gaps.end()) - gaps.begin());
  // A flat top: any of its slopes has the largest gap; take the middle.
  std::size_t last = best;
  while (last + 1 < gaps.size() && gaps[last + 1] >= gaps[best]) ++last;
  found.alpha = (slopes[best] + slopes[last]) / 2;
  found.gap = gaps[best];
  found.beta = (above.height(found.alpha) - below.height(found.alpha)) / 2;
  if (found.gap < 0) return found;
  found.highest = root(slopes, gaps, last, 1, falling);
  found.lowest = root(slopes, gaps, best, -1, rising);
  return found;
}

Extent extent(const Corridor& corridor, const Side& upper, const Side& lower, double x) {
  const Floor above(upper, corridor.upper_hull), below(lower, corridor.lower_hull);
  return {-below.highest_at(x, corridor.lowest, corridor.highest),
          above.highest_at(x, corridor.lowest, corridor.highest)};
}

}  // namespace ringfold::fitting
