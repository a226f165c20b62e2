// The test module: planted bugs, hammers and the lab's relay. Development builds have it, wheels do not.
#include "testing.hpp"

NB_MODULE(_native_testing, m) {
  m.doc() = "What only tests and benchmarks need of the native code: planted bugs, hammers, and the relay.";
  nb::set_leak_warnings(false);
  nb::module_::import_("ringfold._native");  // it has the types that are used here
  ringfold::bind_planted_core(m);
  ringfold::bind_hints_hammer(m);
  ringfold::bind_relay(m);
}
