// This folder is the only place that knows Python.
#include "convert.hpp"

NB_MODULE(_native, m) {
  m.doc() =
      "Ringfold's native core: kernels, the state hash, the sans-I/O engine core, the engine with sockets, the prober, "
      "and hints.";
  nb::set_leak_warnings(false);
  ringfold::bind_kernels(m);
  ringfold::bind_hash(m);
  ringfold::bind_structs(m);
  ringfold::bind_core(m);
  ringfold::bind_engine(m);
  ringfold::bind_probe(m);
  ringfold::bind_fit(m);
  ringfold::bind_hints(m);
}
