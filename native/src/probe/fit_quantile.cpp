// Two quantiles with one slope.
//
// For a slope a and a level q, the best height of a side is the q-quantile of its upright residuals. What is left is
// one unknown, a, and a convex function of it: the check loss, summed over both sides. Its derivative needs only the
// sum of x over the points below the quantile,
//
//   D(a) = S_upper(a) - S_lower(a),    S(a) = sum of x below - q * sum of all x
//
// (when the slope is right, the points below are spread over the window as all points are), and D only grows with a.
// So: begin near, bracket the root, close in. The point that the quantile cuts counts with the part of it that is
// below.
//
// Only points near the floor ever are below. The search looks at the lowest few times q of each side at its first
// slope, and at the end checks on all points that none was left out.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fit_parts.hpp"

namespace ringfold::fitting {

namespace {

constexpr double slope_step_ns = 0.4;  // at the window's ends: how near to the root is near enough
constexpr double first_step_ns = 20;
constexpr std::size_t slices = 16;

struct Active {
  std::vector<double> x, y;
  double rank = 0;   // how many points are below the quantile, of all; with a fraction
  double all_x = 0;  // sum of x over all points, times q
  double sign = 1;
};

struct Cut {
  double height, gradient;
};

// The quantile of the residuals at slope a, and S(a). `scratch` is overwritten.
Cut cut(const Active& side, double a, std::vector<Low>& scratch) {
  const std::size_t n = side.x.size();
  scratch.resize(n);
  for (std::size_t i = 0; i < n; ++i) scratch[i] = {side.y[i] - side.sign * a * side.x[i], side.x[i]};
  const auto below = std::min(static_cast<std::size_t>(side.rank), n - 1);
  const auto at = scratch.begin() + static_cast<std::ptrdiff_t>(below);
  std::nth_element(scratch.begin(), at, scratch.end(),
                   [](const Low& p, const Low& r) { return p.residual < r.residual; });
  double sum = 0;
  for (auto each = scratch.begin(); each != at; ++each) sum += each->x;
  return {at->residual, sum + (side.rank - static_cast<double>(below)) * at->x - side.all_x};
}

// The lowest points of a side at slope a, enough of them for slopes nearby.
Active lowest(const Side& side, double q, double a, double share, std::vector<Low>& scratch) {
  Active active;
  const std::size_t n = side.size();
  active.rank = q * static_cast<double>(n);
  active.all_x = q * std::accumulate(side.x.begin(), side.x.end(), 0.0);
  active.sign = side.sign;
  const auto wanted = static_cast<std::size_t>(share * active.rank) + 16;
  if (wanted >= n) {
    active.x = side.x, active.y = side.y;
    return active;
  }
  scratch.resize(n);
  for (std::size_t i = 0; i < n; ++i) scratch[i] = {side.residual(i, a), static_cast<double>(i)};
  keep_lowest(scratch, wanted);
  active.x.reserve(wanted);
  active.y.reserve(wanted);
  for (std::size_t k = 0; k < wanted; ++k) {
    const auto i = static_cast<std::size_t>(scratch[k].x);
    active.x.push_back(side.x[i]);
    active.y.push_back(side.y[i]);
  }
  return active;
}

bool left_one_out(const Side& side, const Active& active, double a, double height) {
  std::size_t below = 0, below_active = 0;
  for (std::size_t i = 0; i < side.size(); ++i) below += side.residual(i, a) < height;
  for (std::size_t i = 0; i < active.x.size(); ++i)
    below_active += active.y[i] - active.sign * a * active.x[i] < height;
  return below != below_active;
}

// The root of D, which only grows: a bracket by doubling steps, then false position with halving when it lingers.
template <class Gradient>
double find_root(Gradient gradient, double start, double step, double near_enough) {
  double low = start, high = start;
  double at_low = gradient(start), at_high = at_low;
  if (at_low == 0) return start;
  for (int i = 0; i < 60 && at_low > 0; ++i, step *= 2)
    high = low, at_high = at_low, low -= step, at_low = gradient(low);
  for (int i = 0; i < 60 && at_high < 0; ++i, step *= 2)
    low = high, at_low = at_high, high += step, at_high = gradient(high);
  for (int i = 0; i < 100 && high - low > near_enough; ++i) {
    double share = i % 3 == 2 ? 0.5 : at_low / (at_low - at_high);
    share = std::clamp(share, 0.02, 0.98);
    const double middle = low + share * (high - low), at = gradient(middle);
    if (at == 0) return middle;
    (at < 0 ? low : high) = middle;
    (at < 0 ? at_low : at_high) = at;
  }
  return (low + high) / 2;
}

struct Spot {
  double x, y;
};

// The lowest point of each slice of the window.
std::vector<Spot> floor_spots(const Side& side) {
  std::vector<Spot> spots;
  const std::size_t count = std::clamp<std::size_t>(side.size() / 8, 2, slices);
  for (std::size_t k = 0; k < count; ++k) {
    const auto first = side.y.begin() + static_cast<std::ptrdiff_t>(side.size() * k / count);
    const auto last = side.y.begin() + static_cast<std::ptrdiff_t>(side.size() * (k + 1) / count);
    const auto low = std::min_element(first, last);
    spots.push_back({side.x[static_cast<std::size_t>(low - side.y.begin())], *low});
  }
  return spots;
}

}  // namespace

double rough_slope(const Points& points) {
  // The median of the slopes between spots of the same side that are well apart: a few wrong ones do no harm.
  std::vector<double> steep;
  for (const Side* side : {&points.upper, &points.lower}) {
    const auto spots = floor_spots(*side);
    for (std::size_t i = 0; i < spots.size(); ++i)
      for (std::size_t j = i + (spots.size() + 2) / 3; j < spots.size(); ++j)
        if (spots[j].x > spots[i].x)
          steep.push_back(side->sign * (spots[j].y - spots[i].y) / (spots[j].x - spots[i].x));
  }
  if (steep.empty()) return 0;
  const auto middle = steep.begin() + static_cast<std::ptrdiff_t>(steep.size() / 2);
  std::nth_element(steep.begin(), middle, steep.end());
  return *middle;
}

Level quantile(const Points& points, double q, double start) {
  std::vector<Low> scratch;
  const double near_enough = slope_step_ns / static_cast<double>(points.half);
  Cut above{}, below{};
  double alpha = start;
  for (const double share : {2.0, 5.0, 1e9}) {
    const Active upper = lowest(points.upper, q, alpha, share, scratch);
    const Active lower = lowest(points.lower, q, alpha, share, scratch);
    const auto gradient = [&](double a) { return cut(upper, a, scratch).gradient - cut(lower, a, scratch).gradient; };
    alpha = find_root(gradient, alpha, first_step_ns / static_cast<double>(points.half), near_enough);
    above = cut(upper, alpha, scratch);
    below = cut(lower, alpha, scratch);
    if (!left_one_out(points.upper, upper, alpha, above.height) &&
        !left_one_out(points.lower, lower, alpha, below.height))
      break;
  }
  return {{alpha, (above.height - below.height) / 2}, above.height, below.height};
}

}  // namespace ringfold::fitting
