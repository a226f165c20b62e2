#include "ringfold/call_names.hpp"

#include <stdexcept>
#include <utility>

namespace ringfold {
namespace {

constexpr std::size_t max_refused = 65'536;  // calls that others were refused and this peer never makes

}  // namespace

void CallNames::name(OpSpec& spec) {
  std::uint32_t& calls = calls_[spec.tag];
  if (spec.again && calls == 0) throw std::invalid_argument("another attempt of a call that was never made");
  spec.step = step_;
  spec.call = spec.again ? calls - 1 : calls++;
}

void CallNames::forget(const OpSpec& spec) {
  std::uint32_t& calls = calls_[spec.tag];
  if (spec.step == step_ && calls == spec.call + 1) --calls;
}

void CallNames::refuse(const CallName& name, RefusedCall refused) {
  const auto& [tag, step, call] = name;
  const auto counted = calls_.find(tag);
  // The last call counts as one that may come: its caller may be about to make another attempt.
  const bool is_past = step == step_ ? counted != calls_.end() && call + 1 < counted->second
                                     : step != no_step && step_ != no_step && step < step_;
  if (is_past || refused_.size() >= max_refused) return;
  refused_.emplace(name, std::move(refused));
}

std::optional<RefusedCall> CallNames::take_refusal(const OpSpec& spec) {
  auto found = refused_.extract({spec.tag, spec.step, spec.call});
  if (found.empty()) return std::nullopt;
  return std::move(found.mapped());
}

void CallNames::set_step(std::uint64_t step) {
  if (step == step_) return;
  // Members that are ahead may have been refused calls of this step, or of later ones. What is earlier is past.
  const bool is_back = step_ != no_step && step < step_;
  std::erase_if(refused_, [&](const auto& refused) {
    const std::uint64_t its = std::get<1>(refused.first);
    return its == no_step ? step != no_step : step == no_step || is_back || its < step;
  });
  step_ = step;
  calls_.clear();
}

void CallNames::restart() {
  refused_.clear();
  calls_.clear();
}

}  // namespace ringfold
