// One fit, from stamps to a result: collect, find the corridor (trim if it has closed), choose a line, certify.

#include "ringfold/fit.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "fit_parts.hpp"

namespace ringfold::fitting {

namespace {

constexpr std::size_t fewest_points = 16;  // of a side, after trimming
constexpr std::size_t residual_slices = 8, fewest_in_slice = 10, enough_in_slice = 100;

void delays(const Points& points, double alpha, Result& result) {
  if (points.delays.empty()) return;
  std::vector<std::int64_t> sorted;
  sorted.reserve(points.delays.size());
  for (const Delay& each : points.delays) {
    sorted.push_back(each.half + std::llround(alpha * static_cast<double>(each.span) / 2));
  }
  const auto place = [&](double share) {
    return sorted.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(sorted.size() - 1));
  };
  std::nth_element(sorted.begin(), place(0.5), sorted.end());
  if (place(0.99) > place(0.5)) std::nth_element(place(0.5) + 1, place(0.99), sorted.end());
  result.delay_min = *std::min_element(sorted.begin(), place(0.5) + 1);
  result.delay_p50 = *place(0.5);
  result.delay_p99 = *place(0.99);
}

// Takes away the points on the wrong side of a robust line: what crossed it was stamped wrongly. How many they were.
std::size_t trim(Points& points) {
  const Line line = quantile(points, 0.05, rough_slope(points)).line;
  const std::size_t before = points.size();
  for (Side* side : {&points.upper, &points.lower}) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < side->size(); ++i) {
      if (side->residual(i, line.alpha) < side->sign * line.beta) continue;
      side->x[kept] = side->x[i];
      side->y[kept++] = side->y[i];
    }
    side->x.resize(kept);
    side->y.resize(kept);
  }
  std::erase_if(points.rtts, [](const RttSample& sample) { return sample.rtt < 0; });
  return before - points.size();
}

// How far the floor of a slice of the window lies from the floors of its side's other slices: the median over all
// slices. Noise makes it small, and so does a queue for a part of the window; a clock that bends makes it large.
double residual(const Points& points, double alpha) {
  const auto middle_of = [](std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
  };
  std::vector<double> off;
  std::vector<Low> part;
  for (const Side* side : {&points.upper, &points.lower}) {
    const std::size_t n = side->size(), slices = std::clamp<std::size_t>(n / fewest_in_slice, 2, residual_slices);
    const std::size_t every = std::max<std::size_t>(1, n / (residual_slices * enough_in_slice));
    std::vector<double> floors;
    for (std::size_t k = 0; k < slices; ++k) {
      part.clear();
      for (std::size_t i = n * k / slices; i < n * (k + 1) / slices; i += every)
        part.push_back({side->residual(i, alpha), 0});
      keep_lowest(part, part.size() / 10 + 1);
      double floor = part[0].residual;
      for (const Low& each : part) floor = std::max(floor, each.residual);
      floors.push_back(floor);
    }
    const double middle = middle_of(floors);
    for (const double each : floors) off.push_back(std::abs(each - middle));
  }
  return middle_of(off);
}

// Bounds of points that overlap for a nanosecond only can be anywhere.
std::int64_t whole(double value) { return static_cast<std::int64_t>(std::clamp(value, -0x1p62, 0x1p62)); }

// How far the lines of the corridor are from the chosen one, rounded outwards, with the allowances.
void certify(const Points& points, const Corridor& corridor, Result& result) {
  const auto half = static_cast<double>(points.half);
  const auto beta = static_cast<double>(minus(result.beta, points.origin));
  const double allowance = stamp_allowance_ns + wander_allowance * half;
  double outside = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    const double x = (static_cast<double>(i) - 1) * half, line = beta + result.alpha * x;
    const Extent found = extent(corridor, points.upper, points.lower, x);
    result.low[i] = whole(std::floor(found.low - allowance - line));
    result.high[i] = whole(std::ceil(found.high + allowance - line));
    outside = std::max({outside, found.low - line, line - found.high});
  }
  if (outside > allowance) {
    char note[64];
    std::snprintf(note, sizeof note, "; the line leaves the corridor by %.0f ns", outside);
    result.why += note;
  }
}

}  // namespace

Result fit(const Window& window, Estimator estimator) {
  Points points = collect(window);
  Result result;
  result.pairs = points.whole;
  delays(points, 0, result);
  char text[128];
  if (const std::size_t fewest = std::min(points.forward, points.backward); fewest < fewest_pairs) {
    std::snprintf(text, sizeof text, "only %zu pairs %s, and %zu are needed", fewest,
                  points.forward <= points.backward ? "forward" : "backward", fewest_pairs);
    result.refused = text;
    return result;
  }
  if (result.refused = points.refused; !result.refused.empty()) return result;
  if (2 * points.half < shortest_ns) {
    std::snprintf(text, sizeof text, "all pairs lie within %.1f ms, too short for a slope",
                  2e-6 * static_cast<double>(points.half));
    result.refused = text;
    return result;
  }

  straighten(points, rough_slope(points));
  Corridor open = corridor(points.upper, points.lower);
  std::string trimmed_note;
  if (open.overlap && open.crosses()) {
    const auto most = static_cast<std::size_t>(max_trimmed * static_cast<double>(points.size()));
    const std::size_t trimmed = trim(points);
    if (trimmed > most || std::min(points.upper.size(), points.lower.size()) < fewest_points) {
      std::snprintf(text, sizeof text, "the bounds cross: %zu of %zu points lie on the wrong side", trimmed,
                    trimmed + points.size());
      result.refused = text;
      return result;
    }
    std::snprintf(text, sizeof text, "; the bounds crossed, %zu points trimmed", trimmed);
    trimmed_note = text;
    open = corridor(points.upper, points.lower);
  }
  if (!open.overlap) {
    result.refused = "the pairs forward and those backward do not overlap in time";
    return result;
  }

  if (estimator == Estimator::min_rtt && points.rtts.size() < fewest_pairs) {
    result.refused = "too few exchanges came whole for round trips";
    return result;
  }
  Choice choice = choose(points, open, estimator);
  if (!(std::abs(choice.line.beta) < 0x1p53 && std::abs(choice.line.alpha) < 1)) {
    result.refused = "no line fits";
    return result;
  }
  result.t0 = points.t0;
  result.half = points.half;
  result.alpha = choice.line.alpha;
  result.beta = minus(points.origin, -std::llround(choice.line.beta));
  result.sigma = choice.sigma;
  result.sigma_alpha = choice.sigma_alpha;
  result.estimator = choice.estimator;
  result.why = choice.why + trimmed_note;
  result.residual = residual(points, choice.line.alpha);
  certify(points, open, result);
  delays(points, result.alpha, result);
  return result;
}

}  // namespace ringfold::fitting
