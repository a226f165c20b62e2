// What the members call a call: its tag, the program's step, and which call on that tag it is within the step. A name
// stays the same when the op is tried again in another epoch, whatever its sequence is there.
//
// A call that ended without success ends so for every member: one that is late for it must not take the others' next
// call for it. So a refusal may be there before the call is made.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>

#include "ringfold/op_spec.hpp"

namespace ringfold {

using CallName = std::tuple<std::uint64_t, std::uint64_t, std::uint32_t>;  // tag, step, call

struct RefusedCall {
  std::uint32_t epoch;  // in which it was decided
  Bytes reason;
};

class CallNames {
 public:
  // Gives a call its name. std::invalid_argument: another attempt of a call that was never made.
  void name(OpSpec& spec);
  // The call counts as never made: the next one on its tag has its name.
  void forget(const OpSpec& spec);

  void refuse(const CallName& name, RefusedCall refused);
  std::optional<RefusedCall> take_refusal(const OpSpec& spec);

  // The program begins this step, or is outside of any (`no_step`): calls are counted from 0 again.
  void set_step(std::uint64_t step);
  // A member was admitted that has made no call: all members count from 0 again.
  void restart();

 private:
  std::uint64_t step_ = no_step;
  // By tag: how many calls were made in this step, or since an admission.
  std::unordered_map<std::uint64_t, std::uint32_t> calls_;
  std::map<CallName, RefusedCall> refused_;  // calls that will fail when they are made here
};

}  // namespace ringfold
