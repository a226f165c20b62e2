#include "simulated_core.hpp"

namespace ringfold {

void bind_core(nb::module_& m) {
  nb::class_<SimulatedCore> cls(m, "Core", "The engine without I/O, for the simulation.");
  cls.def(nb::init<>());
  bind_simulated_core(cls);
}

}  // namespace ringfold
