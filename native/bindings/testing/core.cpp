// The core of the simulation with a bug in it, by name.
#include "../simulated_core.hpp"
#include "testing.hpp"

namespace ringfold {
namespace {

constexpr std::pair<const char*, bool Planted::*> bugs[] = {
    {"commit_missing_done", &Planted::commit_missing_done},
    {"no_restore", &Planted::no_restore},
    {"accept_old_epoch", &Planted::accept_old_epoch},
    {"apply_duplicate", &Planted::apply_duplicate},
    {"done_after_seal", &Planted::done_after_seal},
    {"forget_lane", &Planted::forget_lane},
    {"tell_nobody", &Planted::tell_nobody},
    {"apply_finished", &Planted::apply_finished},
    {"divide_by_size", &Planted::divide_by_size},
    {"early_unlimited", &Planted::early_unlimited},
    {"done_with_one_part", &Planted::done_with_one_part},
    {"end_forgotten", &Planted::end_forgotten},
    {"direct_forgotten", &Planted::direct_forgotten},
    {"payload_forgotten", &Planted::payload_forgotten},
    {"shares_expire", &Planted::shares_expire},
    {"absent_earns", &Planted::absent_earns},
};

Planted planted_bug(const std::string& name) {
  Planted planted;
  for (const auto& [bug, member] : bugs) {
    if (name != bug) continue;
    planted.*member = true;
    return planted;
  }
  throw nb::value_error("no such planted bug");
}

// A type of its own: the release module has bound SimulatedCore.
class PlantedCore : public SimulatedCore {
 public:
  explicit PlantedCore(const std::string& bug) : SimulatedCore(planted_bug(bug)) {}
};

}  // namespace

void bind_planted_core(nb::module_& m) {
  nb::class_<PlantedCore> cls(m, "PlantedCore", "The engine without I/O, with a bug that the simulation must find.");
  cls.def(nb::init<const std::string&>(), "bug"_a);
  bind_simulated_core(cls);
}

}  // namespace ringfold
