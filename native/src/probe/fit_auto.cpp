// Which line to believe, and how far.
//
// Take the points of one side, detrended, in order: r(1) <= r(2) <= ... The k-th of them is a fine floor to draw a line
// through, for any k. Its standard error is sqrt(k) times the distance between neighbours there. If the floor is
// *sharp* (packets can be late, never early), that distance does not depend on k, and the lowest points are by far the
// best: the hulls. If stamps are noisy, the floor is *soft*: the lowest points are few and far between, and a deeper
// level is better, the more so the softer it is. So the choice of an estimator is the choice of a level, and the data
// say which: the one with the least standard error.
//
// All that holds if both directions have the same distribution, for then both floors are drawn too high by the same
// amount, and their middle is right. If one direction is busy, its quantile lies further from its floor than the
// other's. That shows: the distances from level q to level 2q differ. Then quantiles are charged with the bias that
// this lets expect, and two other lines compete: the hulls (the least level has the least bias), and the middles of the
// quickest round trips, where a packet is only chosen together with its answer, so that a queue in one direction
// removes points from both.
//
// How exact a floor is where it was seen and how far that is from t0 both count: a direction that was free only in the
// first second of the window says less about its middle. `together` does that sum.

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <limits>

#include "fit_parts.hpp"

namespace ringfold::fitting {

namespace {

constexpr double named_level = 0.05;  // of the estimator "quantile"
constexpr double levels[] = {0.1, 0.05, 0.025, 0.0125, 0.00625};
constexpr double fewest_below = 3;                  // points under a level, unless there is no other
constexpr double many_rtts = 0.1, few_rtts = 0.02;  // of all, the quickest
constexpr double unlike = 4;                        // standard deviations between the sides' widths
constexpr double disagree = 2.5;                    // standard deviations between two lines
// A soft floor lies further below its quantile than the distance to the next level shows.
constexpr double bias_charge = 2;
// The error of the hull, in distances between the points next to it; from simulation. A floor is soft if the very
// lowest points are lonelier than those a little higher.
constexpr double soft_from = 2.5, soft_charge = 1.5, sharp_charge = 1.3;
constexpr double busy_charge = 1.5;   // the hull of a busy side is too high, by about as much as it is uncertain
constexpr double min_error_ns = 0.3;  // stamps are whole nanoseconds
constexpr int jackknife = 8;

// The lowest points of a side at some slope, in order.
class Tail {
 public:
  Tail(const Side& side, double alpha, std::size_t count) : low_(side.size()) {
    for (std::size_t i = 0; i < side.size(); ++i) low_[i] = {side.residual(i, alpha), side.x[i]};
    keep_lowest(low_, count);
    std::sort(low_.begin(), low_.end(), [](const Low& a, const Low& b) { return a.residual < b.residual; });
  }

  // The k-th lowest, counted from 0, or between two.
  double at(double k) const {
    k = std::clamp(k, 0.0, static_cast<double>(low_.size() - 1));
    const auto i = static_cast<std::size_t>(k);
    const double part = k - static_cast<double>(i);
    return part > 0 ? low_[i].residual * (1 - part) + low_[i + 1].residual * part : low_[i].residual;
  }

  // The standard error of the k-th, from the distance between the points from `from` to `to`.
  double error(double k, double from, double to) const {
    to = std::min(to, static_cast<double>(low_.size() - 1));
    return std::max(std::sqrt(std::max(k, 1.0)) * (at(to) - at(from)) / std::max(to - from, 1.0), min_error_ns);
  }

  std::size_t size() const { return low_.size(); }
  const Low& operator[](std::size_t i) const { return low_[i]; }

 private:
  std::vector<Low> low_;
};

// How exact a side's floor is, and where in the window it was seen.
struct Evidence {
  double error, x, variance;
};

Evidence evidence(const Tail& tail, double count, double error) {
  const auto n =
      std::clamp<std::size_t>(static_cast<std::size_t>(count), std::min<std::size_t>(8, tail.size()), tail.size());
  double sum = 0, squares = 0;
  for (std::size_t i = 0; i < n; ++i) sum += tail[i].x;
  const double mean = sum / static_cast<double>(n);
  for (std::size_t i = 0; i < n; ++i) squares += (tail[i].x - mean) * (tail[i].x - mean);
  return {error, mean, std::max(squares / static_cast<double>(n), 1.0)};
}

struct Errors {
  double sigma, sigma_alpha;
};

Errors together(const Evidence& upper, const Evidence& lower) {
  const double slope =
      1 / std::sqrt(upper.variance / (upper.error * upper.error) + lower.variance / (lower.error * lower.error));
  return {std::hypot(upper.error / 2, lower.error / 2, slope * (upper.x + lower.x) / 2), slope};
}

Errors level_errors(const Tail& upper, const Tail& lower, double above, double below) {
  const auto side = [](const Tail& tail, double k) {
    const double reach = std::max(1.0, k / 2);
    return evidence(tail, 2 * k, tail.error(k, std::max(0.0, k - reach), k + reach));
  };
  return together(side(upper, above), side(lower, below));
}

// The hulls balance both sides whatever their errors are, so the slope is no better than the middle.
Errors hull_errors(const Points& points, double alpha, bool may_be_sharp) {
  const auto side = [&](const Side& each) {
    const auto count = std::max<std::size_t>(9, each.size() / 50);
    const Tail tail(each, alpha, count);
    const double dense = tail.error(1, 0, std::max(8.0, static_cast<double>(count) - 1));
    double lonely = 0;
    for (const double k : {2.0, 3.0, 4.0}) lonely = std::max(lonely, tail.error(1, 0, k));
    const bool sharp = may_be_sharp && lonely < soft_from * dense;
    return evidence(tail, static_cast<double>(count),
                    sharp ? sharp_charge * tail.error(1, 0, 8) : soft_charge * lonely);
  };
  const Evidence upper = side(points.upper), lower = side(points.lower);
  const double sigma = together(upper, lower).sigma;
  return {sigma, sigma / std::sqrt((upper.variance + lower.variance) / 2)};
}

// ---- The choice

__attribute__((format(printf, 1, 2))) std::string say(const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

Choice with(const char* estimator, const Line& line, const Errors& errors, std::string why) {
  return {line, errors.sigma, errors.sigma_alpha, estimator, std::move(why)};
}

// Both sides' lowest points, and how many points they are the lowest of.
struct Floors {
  Floors(const Points& points, double alpha)
      : upper(points.upper, alpha, count(points.upper)),
        lower(points.lower, alpha, count(points.lower)),
        upper_count(static_cast<double>(points.upper.size())),
        lower_count(static_cast<double>(points.lower.size())) {}

  static std::size_t count(const Side& side) {
    return static_cast<std::size_t>(2 * levels[0] * static_cast<double>(side.size())) + 8;
  }

  bool has(double q) const { return q == levels[0] || q * std::min(upper_count, lower_count) >= fewest_below; }

  Tail upper, lower;
  double upper_count, lower_count;
};

// The distances from level q to level 2q on both sides, and by how many standard deviations they differ.
struct Widths {
  double upper, lower, apart;
};

Widths widths(const Floors& floors, double q) {
  const double above = q * floors.upper_count, below = q * floors.lower_count;
  const double upper = floors.upper.at(2 * above) - floors.upper.at(above);
  const double lower = floors.lower.at(2 * below) - floors.lower.at(below);
  const double error =
      std::hypot(floors.upper.error(above, above / 2, 2 * above), floors.lower.error(below, below / 2, 2 * below));
  return {upper, lower, std::abs(upper - lower) / error};
}

struct Likeness {
  bool alike;
  std::string text;
};

Likeness compare(const Floors& floors) {
  Widths most{1, 1, 0};
  for (const double q : levels) {
    if (!floors.has(q)) break;
    if (const Widths found = widths(floors, q); found.apart > most.apart) most = found;
  }
  if (most.apart < unlike) return {true, "the floors are alike"};
  const bool forward = most.upper > most.lower;
  const double ratio = std::max(most.upper, most.lower) / std::max(std::min(most.upper, most.lower), 1.0);
  return {false, say("the %s floor is %.1f times as wide as the %s one", forward ? "forward" : "backward", ratio,
                     forward ? "backward" : "forward")};
}

// The middles of the quickest round trips. A smaller share of them has less bias and more scatter: the larger share, if
// that does not contradict. With too few trips nothing is certain.
MinRttFit quickest_rtts(const Points& points) {
  if (points.rtts.size() < fewest_pairs) return {{}, std::numeric_limits<double>::infinity(), 0};
  const std::vector<RttSample> quick = quickest(points.rtts, many_rtts);
  const MinRttFit many = min_rtt(quick), few = min_rtt(quickest(quick, few_rtts / many_rtts));
  const bool contradicts = std::abs(many.line.beta - few.line.beta) > disagree * few.sigma;
  return !contradicts && many.sigma <= few.sigma ? many : few;
}

struct BestLevel {
  double q = 0, error = 0, width = 0;
  double error_bound = 0;  // the error, and what chance may have made of it
  bool deepest = false;    // no lower level is clearly worse: the floor may be sharp
};

BestLevel best_level(const Floors& floors, bool alike, const MinRttFit& rtts) {
  BestLevel best;
  double last = 0, last_margin = 1;
  for (const double q : levels) {
    if (!floors.has(q)) break;
    const double above = q * floors.upper_count, below = q * floors.lower_count;
    const Widths wide = widths(floors, q);
    const double sigma = level_errors(floors.upper, floors.lower, above, below).sigma;
    double bias = alike ? 0 : bias_charge * std::abs(wide.upper - wide.lower) / 2;
    const double off = std::abs((floors.upper.at(above) - floors.lower.at(below)) / 2 - rtts.line.beta);
    if (off > (alike ? unlike : disagree) * std::hypot(sigma, rtts.sigma)) bias = std::max(bias, off);
    last = std::hypot(sigma, bias);
    // An error that comes from few points may look small by chance, and the smallest is what is looked for.
    last_margin = 1 + 1 / std::sqrt(std::min(above, below));
    if (best.q == 0 || last_margin * last < best.error_bound)
      best = {q, last, (wide.upper + wide.lower) / 2, last_margin * last, false};
  }
  best.deepest = last <= (1 + last_margin) / 2 * best.error;
  return best;
}

Choice automatic(const Points& points, const Corridor& corridor) {
  const Level start = quantile(points, named_level, rough_slope(points));
  const Floors floors(points, start.line.alpha);
  const auto [alike, because] = compare(floors);
  const MinRttFit rtts = quickest_rtts(points);
  const BestLevel best = best_level(floors, alike, rtts);
  // On a sharp floor the lowest level is the best one, and the hull is better still.
  Errors hull = hull_errors(points, corridor.alpha, best.deepest);

  if (hull.sigma <= best.error_bound && (alike || hull.sigma <= rtts.sigma)) {
    if (!alike) hull.sigma *= busy_charge;
    return with("hull", {corridor.alpha, corridor.beta}, hull,
                say("%s%s: the hulls (%.0f ns)", because.c_str(), alike ? " and sharp" : "", hull.sigma));
  }
  if (!alike && rtts.sigma < best.error_bound)
    return with("min-rtt", rtts.line, {rtts.sigma, rtts.sigma_alpha},
                say("%s: the quickest round trips (%.0f ns)", because.c_str(), rtts.sigma));
  const Level level = best.q == named_level ? start : quantile(points, best.q, start.line.alpha);
  const Errors errors =
      level_errors(floors.upper, floors.lower, best.q * floors.upper_count, best.q * floors.lower_count);
  return with("quantile", level.line, {best.error, errors.sigma_alpha},
              say("%s, with a spread of %.0f ns: the %.3g %% quantiles", because.c_str(), best.width, 100 * best.q));
}

// ---- By name

Choice named_quantile(const Points& points) {
  const Level level = quantile(points, named_level, rough_slope(points));
  const double above = named_level * static_cast<double>(points.upper.size());
  const double below = named_level * static_cast<double>(points.lower.size());
  const Tail upper(points.upper, level.line.alpha, static_cast<std::size_t>(2 * above) + 8);
  const Tail lower(points.lower, level.line.alpha, static_cast<std::size_t>(2 * below) + 8);
  return with("quantile", level.line, level_errors(upper, lower, above, below), "asked for");
}

// The scatter of fits to every eighth point, for lines whose errors no formula gives.
template <class Fit>
Errors by_parts(const Points& points, Fit fit) {
  double betas = 0, beta_squares = 0, alphas = 0, alpha_squares = 0;
  for (int part = 0; part < jackknife; ++part) {
    Points some;
    some.half = points.half;
    for (const auto& [from, to] : {std::pair{&points.upper, &some.upper}, std::pair{&points.lower, &some.lower}})
      for (auto i = static_cast<std::size_t>(part); i < from->size(); i += jackknife)
        to->x.push_back(from->x[i]), to->y.push_back(from->y[i]);
    const Line line = fit(some);
    betas += line.beta, beta_squares += line.beta * line.beta;
    alphas += line.alpha, alpha_squares += line.alpha * line.alpha;
  }
  const auto deviation = [](double sum, double squares) {
    return std::sqrt(std::max(squares - sum * sum / jackknife, 0.0) / (jackknife - 1) / jackknife);
  };
  return {std::max(deviation(betas, beta_squares), min_error_ns), deviation(alphas, alpha_squares)};
}

}  // namespace

Choice choose(const Points& points, const Corridor& corridor, Estimator estimator) {
  switch (estimator) {
    case Estimator::automatic:
      return automatic(points, corridor);
    case Estimator::quantile:
      return named_quantile(points);
    case Estimator::hull:
      return with("hull", {corridor.alpha, corridor.beta}, hull_errors(points, corridor.alpha, true), "asked for");
    case Estimator::svm:
      return with("svm", svm(points, 1), by_parts(points, [](const Points& some) { return svm(some, jackknife); }),
                  "asked for");
    case Estimator::least_squares:
      return with("least-squares", least_squares(points), by_parts(points, least_squares), "asked for");
    case Estimator::min_rtt: {
      const MinRttFit rtts = min_rtt(quickest(points.rtts, many_rtts));
      return with("min-rtt", rtts.line, {rtts.sigma, rtts.sigma_alpha}, "asked for");
    }
  }
  return {};
}

}  // namespace ringfold::fitting
