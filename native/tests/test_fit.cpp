// The parts of a fit against slow ways to find the same, and stamps of nonsense.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.hpp"
#include "probe/fit_parts.hpp"

using namespace ringfold::fitting;

namespace {

// xorshift64*: the same numbers on every machine.
struct Random {
  uint64_t state = 0x9e3779b97f4a7c15;
  uint64_t next() {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 0x2545f4914f6cdd1d;
  }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
};

Points cloud(Random& random, size_t count, double width) {
  Points points;
  points.half = 1'000'000'000;
  for (Side* side : {&points.upper, &points.lower}) {
    for (size_t i = 0; i < count; ++i) side->x.push_back(std::floor((2 * random.unit() - 1) * 1e9));
    std::sort(side->x.begin(), side->x.end());
    for (size_t i = 0; i < count; ++i)
      side->y.push_back(std::floor(side->sign * 2e-5 * side->x[i] + width - 1000 * std::log(1 - random.unit())));
  }
  return points;
}

bool fits(const Points& points, double alpha, double beta) {
  for (const Side* side : {&points.upper, &points.lower})
    for (size_t i = 0; i < side->size(); ++i)
      if (side->residual(i, alpha) < side->sign * beta - 1e-6) return false;
  return true;
}

// Every extreme line of the corridor passes through two points.
TEST(corridor_agrees_with_trying_all_lines) {
  Random random;
  for (int round = 0; round < 60; ++round) {
    const Points points = cloud(random, 12, 500.0 * (round % 4));
    const Corridor found = corridor(points.upper, points.lower);
    std::vector<std::pair<double, double>> spots;
    for (const Side* side : {&points.upper, &points.lower})
      for (size_t i = 0; i < side->size(); ++i) spots.push_back({side->x[i], side->sign * side->y[i]});
    const double at[] = {-1e9, -3e8, 0, 1e9};
    double low[4], high[4];
    std::fill(low, low + 4, 1e300), std::fill(high, high + 4, -1e300);
    for (size_t i = 0; i < spots.size(); ++i)
      for (size_t j = 0; j < i; ++j) {
        if (spots[i].first == spots[j].first) continue;
        const double alpha = (spots[i].second - spots[j].second) / (spots[i].first - spots[j].first);
        const double beta = spots[i].second - alpha * spots[i].first;
        if (!fits(points, alpha, beta)) continue;
        for (size_t k = 0; k < 4; ++k) {
          low[k] = std::min(low[k], beta + alpha * at[k]);
          high[k] = std::max(high[k], beta + alpha * at[k]);
        }
      }
    CHECK(!found.crosses());
    CHECK(fits(points, found.alpha, found.beta));
    for (size_t k = 0; k < 4; ++k) {
      const Extent extreme = extent(found, points.upper, points.lower, at[k]);
      CHECK_MESSAGE(std::abs(extreme.low - low[k]) < 1e-3 && std::abs(extreme.high - high[k]) < 1e-3,
                    "round %d at %g: %g to %g, not %g to %g", round, at[k], extreme.low, extreme.high, low[k], high[k]);
    }
  }
}

double gap(const Points& points, double alpha) {
  double least[2] = {1e300, 1e300};
  for (const Side* side : {&points.upper, &points.lower})
    for (size_t i = 0; i < side->size(); ++i)
      least[side->sign < 0] = std::min(least[side->sign < 0], side->residual(i, alpha));
  return least[0] + least[1];
}

TEST(no_slope_has_a_larger_gap) {
  Random random;
  const Points points = cloud(random, 400, 100);
  const Corridor found = corridor(points.upper, points.lower);
  CHECK(std::abs(gap(points, found.alpha) - found.gap) < 1e-6);
  for (int step = -200; step <= 200; ++step) CHECK(gap(points, found.alpha + step * 1e-9) <= found.gap + 1e-6);
}

// The check loss at a slope, each side at its own quantile.
double check_loss(const Points& points, double q, double alpha) {
  double sum = 0;
  for (const Side* side : {&points.upper, &points.lower}) {
    std::vector<double> residuals;
    for (size_t i = 0; i < side->size(); ++i) residuals.push_back(side->residual(i, alpha));
    std::vector<double> sorted = residuals;
    std::sort(sorted.begin(), sorted.end());
    const double height = sorted[static_cast<size_t>(q * static_cast<double>(sorted.size()))];
    for (const double each : residuals) sum += each > height ? q * (each - height) : (1 - q) * (height - each);
  }
  return sum;
}

TEST(the_quantiles_have_the_least_loss) {
  Random random;
  for (const double q : {0.003, 0.05, 0.1, 0.5}) {
    const Points points = cloud(random, 1001, 100);
    // From a start that is far off, too: the points that matter are others there.
    for (const double start : {2e-5, 3e-5, -1e-3}) {
      const double alpha = quantile(points, q, start).line.alpha, loss = check_loss(points, q, alpha);
      for (const double step : {1e-9, 3e-9, 1e-8, 1e-7, 1e-6})
        for (const double sign : {-1.0, 1.0})
          CHECK_MESSAGE(check_loss(points, q, alpha + sign * step) >= loss * (1 - 1e-6), "q %g from %g, step %g", q,
                        start, sign * step);
    }
  }
}

TEST(the_lowest_are_kept) {
  Random random;
  for (const size_t count : {0u, 1u, 7u, 100u, 400u, 999u, 1000u, 2000u}) {
    std::vector<Low> points;
    // In order, so that a sample of every so many is not a random one.
    for (size_t i = 0; i < 1000; ++i) points.push_back({static_cast<double>(count % 2 ? i : random.next() % 512), 0});
    std::vector<double> wanted;
    for (const Low& each : points) wanted.push_back(each.residual);
    std::sort(wanted.begin(), wanted.end());
    keep_lowest(points, count);
    CHECK(points.size() == std::min<size_t>(count, 1000));
    std::vector<double> got;
    for (const Low& each : points) got.push_back(each.residual);
    std::sort(got.begin(), got.end());
    CHECK(std::equal(got.begin(), got.end(), wanted.begin()));
  }
}

// Whatever the stamps are, a fit ends, with a line or with a reason.
TEST(nonsense_ends_with_a_reason_or_a_line) {
  Random random;
  constexpr int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
  const int64_t odd[] = {0, 1, -1, least, most, least + 1, int64_t{1} << 52, int64_t{1} << 60, 4'000'000'000};
  size_t lines = 0, reasons = 0;
  for (int round = 0; round < 400; ++round) {
    const size_t rows = random.next() % 60;
    std::vector<int64_t> stamps;
    std::vector<uint8_t> kept;
    for (size_t i = 0; i < rows; ++i) {
      const auto now = static_cast<int64_t>(i) * 4'000'000;
      for (const int64_t each :
           {now, now + 9000, now + 800'000, now + 809'000, now, now + 9000, now + 800'000, now + 809'000})
        stamps.push_back(each + static_cast<int64_t>(random.next() % (round % 3 ? 1000 : 100'000'000)));
      if (round % 2) stamps[8 * i + random.next() % 8] = odd[random.next() % std::size(odd)];
      kept.push_back(static_cast<uint8_t>(round % 5 ? 3 : random.next() % 256));
    }
    for (const Estimator estimator : {Estimator::automatic, Estimator::quantile, Estimator::hull, Estimator::svm,
                                      Estimator::least_squares, Estimator::min_rtt}) {
      const Result found = fit({stamps.data(), kept.data(), rows}, estimator);
      CHECK(std::isfinite(found.alpha) && std::isfinite(found.sigma) && std::isfinite(found.residual));
      ++(found.refused.empty() ? lines : reasons);
      for (size_t k = 0; k < 3; ++k) CHECK(found.low[k] <= found.high[k]);
    }
  }
  CHECK(lines > 100 && reasons > 100);
}

}  // namespace
