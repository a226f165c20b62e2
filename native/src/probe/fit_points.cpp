// Stamps become points. Everything is integer until the exact origins are taken off.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fit_parts.hpp"

namespace ringfold::fitting {

namespace {

constexpr std::int64_t exact = std::int64_t{1} << 52;  // integers below become double as they are

struct Raw {
  std::int64_t x, y;
};

void sort_by_x(std::vector<Raw>& points) {
  const auto before = [](const Raw& a, const Raw& b) { return a.x < b.x; };
  if (!std::is_sorted(points.begin(), points.end(), before)) std::stable_sort(points.begin(), points.end(), before);
}

bool shift(const std::vector<Raw>& from, std::int64_t t0, std::int64_t origin, Side& to) {
  to.x.resize(from.size());
  to.y.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::int64_t y = minus(from[i].y, origin);
    if (y <= -exact || y >= exact) return false;
    to.x[i] = static_cast<double>(minus(from[i].x, t0));
    to.y[i] = to.sign * static_cast<double>(y);
  }
  return true;
}

void add_rtt(std::vector<RttSample>& rtts, const Points& points, const std::int64_t* t, const std::int64_t* r) {
  const double there = static_cast<double>(minus(minus(t[1], t[0]), points.origin));
  const double back = static_cast<double>(minus(minus(r[0], r[1]), points.origin));
  const double begin = static_cast<double>(minus(t[0], points.t0)), end = static_cast<double>(minus(r[1], points.t0));
  rtts.push_back({(begin + end) / 2, (there + back) / 2, there - back, end - begin});
}

constexpr std::size_t sampled_every = 16;

}  // namespace

void straighten(Points& points, double slope) {
  for (RttSample& sample : points.rtts) sample.rtt += slope * sample.span;
}

void keep_lowest(std::vector<Low>& points, std::size_t count) {
  const auto before = [](const Low& a, const Low& b) { return a.residual < b.residual; };
  const std::size_t n = points.size();
  if (count >= n) return;
  if (n >= 16 * sampled_every && count < n / 2) {
    double sample[512];
    const std::size_t stride = std::max(sampled_every, (n + 511) / 512), taken = (n + stride - 1) / stride;
    for (std::size_t i = 0; i < taken; ++i) sample[i] = points[i * stride].residual;
    // A sample of m has about m * count / n of the lowest; two and a half standard deviations more is nearly always
    // enough.
    const double share = static_cast<double>(count) / static_cast<double>(n) * static_cast<double>(taken);
    const std::size_t place = std::min(static_cast<std::size_t>(share + 2.5 * std::sqrt(share) + 2), taken - 1);
    std::nth_element(sample, sample + place, sample + taken);
    const double threshold = sample[place];
    std::size_t below = 0, kept = 0;
    for (const Low& each : points) below += each.residual <= threshold;
    if (below >= count) {
      for (std::size_t i = 0; i < n; ++i) {
        const Low each = points[i];
        points[kept] = each;
        kept += each.residual <= threshold;
      }
      points.resize(kept);
    }
  }
  if (count < points.size()) {
    std::nth_element(points.begin(), points.begin() + static_cast<std::ptrdiff_t>(count), points.end(), before);
    points.resize(count);
  }
}

Points collect(const Window& window) {
  Points points;
  std::vector<Raw> upper, lower;
  upper.reserve(2 * window.rows);
  lower.reserve(2 * window.rows);
  points.delays.reserve(window.rows);
  for (std::size_t i = 0; i < window.rows; ++i) {
    const std::int64_t* s = window.stamps + columns * i;
    const bool there = window.kept[i] & forward_kept, back = window.kept[i] & backward_kept;
    points.forward += there;
    points.backward += back;
    points.whole += there && back;
    if (there) upper.push_back({s[0], minus(s[1], s[0])}), upper.push_back({s[2], minus(s[3], s[2])});
    if (back) lower.push_back({s[5], minus(s[4], s[5])}), lower.push_back({s[7], minus(s[6], s[7])});
    if (s[0] && s[1] && s[4] && s[5]) {
      const std::int64_t span = minus(s[5], s[0]);
      points.delays.push_back({minus(span, minus(s[4], s[1])) / 2, span});
    }
  }
  if (points.forward < fewest_pairs || points.backward < fewest_pairs) return points;

  sort_by_x(upper);
  sort_by_x(lower);
  const std::int64_t first = std::min(upper.front().x, lower.front().x),
                     last = std::max(upper.back().x, lower.back().x);
  const std::int64_t span = minus(last, first);
  if (span < 0 || span >= exact) {
    points.refused = "the stamps are further apart than any window is long";
    return points;
  }
  points.t0 = first + span / 2;
  points.half = last - points.t0;
  points.origin = upper.front().y;
  if (!shift(upper, points.t0, points.origin, points.upper) || !shift(lower, points.t0, points.origin, points.lower)) {
    points.refused = "the clocks' difference moved by weeks within the window";
    return points;
  }
  points.rtts.reserve(2 * points.whole);
  for (std::size_t i = 0; i < window.rows; ++i) {
    if ((window.kept[i] & forward_kept) == 0 || (window.kept[i] & backward_kept) == 0) continue;
    const std::int64_t* s = window.stamps + columns * i;
    add_rtt(points.rtts, points, s, s + 4);
    add_rtt(points.rtts, points, s + 2, s + 6);
  }
  return points;
}

}  // namespace ringfold::fitting
