// The parts of a fit, for fit_*.cpp and their tests.
//
// Both sides are kept *upright*: a lower point's difference has its sign changed, so that on either side a delay pushes
// a point up from the floor, and one piece of code serves both. On the lower side the line then has slope -alpha. x
// counts from t0 and y from the exact integer `origin`; only these small numbers become double, so that clocks 10^17 ns
// apart lose nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "ringfold/fit.hpp"

namespace ringfold::fitting {

// A difference that may run over: stamps are whatever a packet contained. What ran over is far from all others, and is
// refused.
inline std::int64_t minus(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) - static_cast<std::uint64_t>(b));
}

struct Line {
  double alpha = 0, beta = 0;  // beta at x = 0
};

struct Side {
  std::vector<double> x, y;  // sorted by x
  double sign = 1;           // 1 upper, -1 lower: the line's slope here is sign * alpha

  std::size_t size() const { return x.size(); }
  double residual(std::size_t i, double alpha) const { return y[i] - sign * alpha * x[i]; }
};

// A packet there and a packet back of one exchange, `span` apart. While the other end held it, the clocks drifted:
// until `straighten` has taken that out, `rtt` is off by the skew times the span (4 ms at 30 ppm are 120 ns).
struct RttSample {
  double x, middle, rtt, span;
};

// Half a round trip, and the time from its first stamp to its last.
struct Delay {
  std::int64_t half, span;
};

struct Points {
  std::int64_t t0 = 0, half = 0, origin = 0;
  Side upper, lower{{}, {}, -1};
  std::vector<RttSample> rtts;
  std::size_t forward = 0, backward = 0, whole = 0;  // pairs kept there, back, both
  std::vector<Delay> delays;                         // as stamped, without regard to the skew
  const char* refused = "";

  std::size_t size() const { return upper.size() + lower.size(); }
};

Points collect(const Window& window);

// Takes the drift during each round trip out of it.
void straighten(Points& points, double slope);

// A point of a side by its height over a line of some slope.
struct Low {
  double residual, x;
};

// Brings the `count` lowest to the front, in no order, and drops most of the others. Of thousands of points a few
// hundred matter; a threshold from a sample sets them apart in one pass without a branch, which is most of the work of
// nth_element.
void keep_lowest(std::vector<Low>& points, std::size_t count);

// ---- fit_hull.cpp

// The lines of one slope between the sides: the gap, and the highest and lowest of them at x = 0. A gap below 0: none.
struct Corridor {
  double alpha = 0;  // of the largest gap
  double gap = 0;
  double beta = 0;                 // the middle of the gap
  double lowest = 0, highest = 0;  // slopes of the lines that fit at all
  bool overlap = true;             // false: the sides do not overlap in time, and every slope fits
  std::vector<std::size_t> upper_hull, lower_hull;

  bool crosses() const { return gap < 0; }
};

Corridor corridor(const Side& upper, const Side& lower);

struct Extent {
  double low, high;
};

// The values at x that the corridor's lines take.
Extent extent(const Corridor& corridor, const Side& upper, const Side& lower, double x);

// ---- fit_quantile.cpp

struct Level {
  Line line;
  double floor_upper = 0, floor_lower = 0;  // the sides' quantiles at x = 0, upright
};

// A slope that is near enough to begin with.
double rough_slope(const Points& points);

// Both sides' quantile `q` with one slope: the minimum of the check loss.
Level quantile(const Points& points, double q, double start);

// ---- fit_svm.cpp and fit_baselines.cpp

struct MinRttFit {
  Line line;
  double sigma = 0, sigma_alpha = 0;
};

Line svm(const Points& points, double cost);
Line least_squares(const Points& points);

// The `share` of all trips that took least time, but not fewer than `fewest_pairs`.
std::vector<RttSample> quickest(const std::vector<RttSample>& rtts, double share);

// A robust regression over the middles of round trips.
MinRttFit min_rtt(const std::vector<RttSample>& rtts);

// ---- fit_auto.cpp

struct Choice {
  Line line;
  double sigma = 0, sigma_alpha = 0;
  const char* estimator = "";
  std::string why;
};

Choice choose(const Points& points, const Corridor& corridor, Estimator estimator);

}  // namespace ringfold::fitting
