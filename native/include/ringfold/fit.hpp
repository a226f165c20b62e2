// From a window of probe exchanges to a line: C_dst - C_src = beta + alpha * (C_src - t0).
//
// Words. A packet from the source gives an *upper* point (t_tx, t_rx - t_tx): the true difference lies below it, by the
// packet's delay. A packet back gives a *lower* point (r_rx, r_tx - r_rx). Both sides have a *floor*: the points of
// packets that met no queue. The line runs in the middle between the two floors, with their common slope. The
// *corridor* is the set of all lines that pass below every upper and above every lower point; if no stamp is wrong, the
// truth is one of them.
//
// A fit is a pure function of its arguments: no clock, no randomness, the same bits every time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ringfold::fitting {

inline constexpr std::size_t columns = 8;  // t1_tx t1_rx t2_tx t2_rx r1_tx r1_rx r2_tx r2_rx
inline constexpr std::uint8_t forward_kept = 1, backward_kept = 2;
inline constexpr std::size_t fewest_pairs = 10;          // in each direction
inline constexpr std::int64_t shortest_ns = 10'000'000;  // between the first and the last point
inline constexpr double max_trimmed = 0.02;              // of all points, when the bounds cross

// What the certified bound allows on each side beyond the stamps themselves: for reading the clock (a kernel stamp is
// mapped from one clock to another), and for an oscillator that does not keep a straight line over the window, as a
// share of half of it.
inline constexpr double stamp_allowance_ns = 50;
inline constexpr double wander_allowance = 10e-9;

enum class Estimator { automatic, quantile, hull, svm, least_squares, min_rtt };

// Rows of `columns` stamps in nanoseconds, and for each row which of its two pairs may be used.
struct Window {
  const std::int64_t* stamps;
  const std::uint8_t* kept;
  std::size_t rows;
};

struct Result {
  std::int64_t t0 = 0, half = 0, beta = 0;
  double alpha = 0, sigma = 0, sigma_alpha = 0;
  std::array<std::int64_t, 3> low{}, high{};  // truth minus line at t0 - half, t0, t0 + half
  double residual = 0;
  std::int64_t delay_min = 0, delay_p50 = 0, delay_p99 = 0;
  std::size_t pairs = 0;
  std::string estimator, why, refused;  // with `refused`, only pairs and delays hold
};

Result fit(const Window& window, Estimator estimator);

}  // namespace ringfold::fitting
