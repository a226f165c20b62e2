// The linear support vector machine: the line with the widest margin between upper and lower points, where a point
// inside the margin costs C times its depth. Both axes are first scaled to 0..1.
//
// Its weakness is that scaling. The margin is Euclidean, so its width and what C means depend on the range of y: one
// packet delayed by a millisecond squeezes the floor into a thousandth of the axis, the margin swallows most points,
// and the line becomes little better than the mean of all. The slope suffers first. It is here to be compared with.
//
// Three unknowns and thousands of points: not the dual, but Newton's method on the primal, with the corner of the hinge
// loss rounded off over a width that shrinks from round to round until it no longer matters. The same steps every time.

#include <algorithm>
#include <array>
#include <cmath>

#include "fit_parts.hpp"

namespace ringfold::fitting {

namespace {

constexpr double first_width = 1, last_width = 1e-5, narrower = 0.1;
constexpr int max_steps = 30;

using Vector = std::array<double, 3>;  // of x, of y, constant

struct Sample {
  double x, y, side;
};

struct Loss {
  double value = 0;
  Vector gradient{};
  std::array<Vector, 3> curvature{};
};

Loss loss(const std::vector<Sample>& samples, const Vector& w, double cost, double width) {
  Loss sum;
  sum.value = (w[0] * w[0] + w[1] * w[1]) / 2;
  sum.gradient = {w[0], w[1], 0};
  sum.curvature[0][0] = sum.curvature[1][1] = 1;
  sum.curvature[2][2] = 1e-12;  // where no point is near a margin, the constant has no curvature of its own
  for (const Sample& sample : samples) {
    const double depth = 1 - sample.side * (w[0] * sample.x + w[1] * sample.y + w[2]);
    if (depth <= -width) continue;
    const bool rounded = depth < width;
    const double slope = rounded ? (depth + width) / (2 * width) : 1;
    sum.value += cost * (rounded ? (depth + width) * (depth + width) / (4 * width) : depth);
    const Vector at{sample.x, sample.y, 1};
    for (std::size_t i = 0; i < 3; ++i) sum.gradient[i] -= cost * slope * sample.side * at[i];
    if (!rounded) continue;
    const double bend = cost / (2 * width);
    for (std::size_t i = 0; i < 3; ++i)
      for (std::size_t j = 0; j < 3; ++j) sum.curvature[i][j] += bend * at[i] * at[j];
  }
  return sum;
}

// Gauss, for a matrix that is symmetric and positive.
Vector solve(std::array<Vector, 3> m, Vector b) {
  for (std::size_t k = 0; k < 3; ++k)
    for (std::size_t i = k + 1; i < 3; ++i) {
      const double factor = m[i][k] / m[k][k];
      for (std::size_t j = k; j < 3; ++j) m[i][j] -= factor * m[k][j];
      b[i] -= factor * b[k];
    }
  for (std::size_t k = 3; k-- > 0;) {
    for (std::size_t j = k + 1; j < 3; ++j) b[k] -= m[k][j] * b[j];
    b[k] /= m[k][k];
  }
  return b;
}

void descend(const std::vector<Sample>& samples, Vector& w, double cost, double width) {
  Loss here = loss(samples, w, cost, width);
  for (int step = 0; step < max_steps; ++step) {
    const Vector way = solve(here.curvature, here.gradient);
    double share = 1;
    Loss there;
    Vector to;
    for (int halved = 0; halved < 30; ++halved, share /= 2) {
      for (std::size_t i = 0; i < 3; ++i) to[i] = w[i] - share * way[i];
      there = loss(samples, to, cost, width);
      if (there.value < here.value) break;
    }
    if (!(there.value < here.value)) return;
    const bool settled = here.value - there.value < 1e-12 * here.value;
    w = to, here = there;
    if (settled) return;
  }
}

}  // namespace

Line svm(const Points& points, double cost) {
  double x_low = points.upper.x.front(), x_high = x_low, y_low = points.upper.y.front(), y_high = y_low;
  for (const Side* side : {&points.upper, &points.lower})
    for (std::size_t i = 0; i < side->size(); ++i) {
      x_low = std::min(x_low, side->x[i]), x_high = std::max(x_high, side->x[i]);
      y_low = std::min(y_low, side->sign * side->y[i]), y_high = std::max(y_high, side->sign * side->y[i]);
    }
  const double x_range = std::max(x_high - x_low, 1.0), y_range = std::max(y_high - y_low, 1.0);
  std::vector<Sample> samples;
  samples.reserve(points.size());
  for (const Side* side : {&points.upper, &points.lower})
    for (std::size_t i = 0; i < side->size(); ++i)
      samples.push_back({(side->x[i] - x_low) / x_range, (side->sign * side->y[i] - y_low) / y_range, side->sign});

  Vector w{0, 1, -0.5};
  // NOLINTNEXTLINE(bugprone-float-loop-counter): few steps, each by a factor
  for (double width = first_width; width >= last_width; width *= narrower) descend(samples, w, cost, width);
  if (w[1] == 0) return {0, (y_low + y_high) / 2};
  // w0 x + w1 y + w2 = 0, in the points' own units, at x = 0.
  const double alpha = -w[0] / w[1] * y_range / x_range;
  return {alpha, y_low - w[2] / w[1] * y_range - alpha * x_low};
}

}  // namespace ringfold::fitting
