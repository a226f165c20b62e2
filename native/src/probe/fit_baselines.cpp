// The obvious baselines: regressions. They are here to be compared with, and (the round trips) to keep the choice
// honest.

#include <algorithm>
#include <cmath>

#include "fit_parts.hpp"

namespace ringfold::fitting {

namespace {

constexpr int huber_rounds = 4;
// In standard deviations: 95 % of the efficiency of least squares on normal noise.
constexpr double huber_width = 1.345;
constexpr double deviation_of_mad = 1.4826;

// Sums of a weighted regression of y on x.
struct Sums {
  double w = 0, x = 0, y = 0, xx = 0, xy = 0;

  void add(double at, double value, double weight = 1) {
    w += weight, x += weight * at, y += weight * value, xx += weight * at * at, xy += weight * at * value;
  }

  Line line() const {
    const double spread = w * xx - x * x;
    const double alpha = spread > 0 ? (w * xy - x * y) / spread : 0;
    return {alpha, (y - alpha * x) / w};
  }
};

Line regression(const Side& side) {
  Sums sums;
  for (std::size_t i = 0; i < side.size(); ++i) sums.add(side.x[i], side.sign * side.y[i]);
  return sums.line();
}

}  // namespace

Line least_squares(const Points& points) {
  const Line above = regression(points.upper), below = regression(points.lower);
  return {(above.alpha + below.alpha) / 2, (above.beta + below.beta) / 2};
}

std::vector<RttSample> quickest(const std::vector<RttSample>& rtts, double share) {
  const std::size_t all = rtts.size();
  const auto wanted =
      std::clamp(static_cast<std::size_t>(share * static_cast<double>(all)), std::min(fewest_pairs, all), all);
  std::vector<Low> quick(all);
  for (std::size_t i = 0; i < all; ++i) quick[i] = {rtts[i].rtt, static_cast<double>(i)};
  keep_lowest(quick, wanted);
  std::vector<RttSample> chosen;
  chosen.reserve(wanted);
  for (const Low& each : quick) chosen.push_back(rtts[static_cast<std::size_t>(each.x)]);
  return chosen;
}

MinRttFit min_rtt(const std::vector<RttSample>& rtts) {
  MinRttFit found;
  std::vector<double> off(rtts.size());
  Sums sums;
  for (const RttSample& sample : rtts) sums.add(sample.x, sample.middle);
  found.line = sums.line();
  double scale = 0;
  for (int round = 0; round < huber_rounds; ++round) {
    for (std::size_t i = 0; i < rtts.size(); ++i)
      off[i] = std::abs(rtts[i].middle - found.line.beta - found.line.alpha * rtts[i].x);
    const auto middle = off.begin() + static_cast<std::ptrdiff_t>(off.size() / 2);
    std::nth_element(off.begin(), middle, off.end());
    scale = deviation_of_mad * *middle;
    if (scale <= 0) break;
    sums = {};
    for (const RttSample& sample : rtts) {
      const double distance = std::abs(sample.middle - found.line.beta - found.line.alpha * sample.x);
      sums.add(sample.x, sample.middle, std::min(1.0, huber_width * scale / std::max(distance, 1e-9)));
    }
    found.line = sums.line();
  }
  // The chosen trips may lie in one part of the window; t0 may not.
  Sums places;
  for (const RttSample& sample : rtts) places.add(sample.x, 0);
  const double mean = places.x / places.w, variance = std::max(places.xx / places.w - mean * mean, 1.0);
  const double error = std::max(scale, 0.3) / std::sqrt(places.w);
  found.sigma_alpha = error / std::sqrt(variance);
  found.sigma = std::hypot(error, mean * found.sigma_alpha);
  return found;
}

}  // namespace ringfold::fitting
