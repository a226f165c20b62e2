#include <algorithm>
#include <cmath>

#include "ringfold/probe.hpp"

namespace ringfold::probe {
namespace {

constexpr std::size_t max_samples = 32;
constexpr Ns min_apart = 300'000;      // of two samples: else a burst of wakes would leave no baseline
constexpr double slope_weight = 1e11;  // in ns^2: of the slope known before, against samples. It is that of two samples
                                       // 0.4 ms apart: closer ones say more about their own noise than about the slope
constexpr double bend_ns = 30;         // beyond the sample's own uncertainty
constexpr double step_ns = 2'000;      // no steering does this at once,
constexpr double step_rate = 600e-6;   // nor moves the clock faster (the kernel's limit is 500 ppm)

}  // namespace

double ClockMap::predicted(Ns raw) const {
  return intercept_ + slope_ * static_cast<double>(raw - samples_.back().raw);
}

void ClockMap::add(Ns raw_before, Ns real, Ns raw_after) {
  const Ns raw = raw_before + (raw_after - raw_before) / 2;
  const Sample sample{raw, real - raw};
  step_ = 0;
  if (!samples_.empty()) {
    const Sample& last = samples_.back();
    if (raw <= last.raw) return;
    const double off = static_cast<double>(sample.lead - last.lead) - predicted(raw);
    const double uncertain = static_cast<double>(raw_after - raw_before) / 2;
    if (std::abs(off) > step_ns + uncertain + step_rate * static_cast<double>(raw - last.raw)) {
      step_ = static_cast<Ns>(std::llround(off));
      samples_.clear();
    } else if (std::abs(off) > bend_ns + uncertain && samples_.size() > 1) {
      samples_.erase(samples_.begin(), samples_.end() - 1);
      ++bends_;
    }
  }
  if (samples_.size() > 1 && raw - samples_.back().raw < min_apart) return;
  samples_.push_back(sample);
  if (samples_.size() > max_samples) samples_.pop_front();
  fit();
}

// A line through the leads. Alone, a sample keeps the slope of before: a step does not change the rate.
void ClockMap::fit() {
  const Sample& last = samples_.back();
  const double count = static_cast<double>(samples_.size());
  if (samples_.size() == 1) {
    intercept_ = 0;
    return;
  }
  double mean_x = 0, mean_y = 0;
  for (const Sample& each : samples_) {
    mean_x += static_cast<double>(each.raw - last.raw) / count;
    mean_y += static_cast<double>(each.lead - last.lead) / count;
  }
  double xx = slope_weight, xy = slope_weight * slope_;
  for (const Sample& each : samples_) {
    const double x = static_cast<double>(each.raw - last.raw) - mean_x;
    xx += x * x;
    xy += x * (static_cast<double>(each.lead - last.lead) - mean_y);
  }
  slope_ = xy / xx;
  intercept_ = mean_y - slope_ * mean_x;
  if (samples_.size() < max_samples) return;
  double squares = 0;
  for (const Sample& each : samples_) {
    const double rest = static_cast<double>(each.lead - last.lead) - predicted(each.raw);
    squares += rest * rest;
  }
  noise_ = std::sqrt(squares / (count - 2));
}

Ns ClockMap::to_raw(Ns real) const {
  const Sample& last = samples_.back();
  const Ns since = real - (last.raw + last.lead);
  const double lead = (intercept_ + slope_ * static_cast<double>(since)) / (1 + slope_);
  return last.raw + since - static_cast<Ns>(std::llround(lead));
}

}  // namespace ringfold::probe
