// What the test module has besides the release module.
#pragma once

#include "../convert.hpp"

namespace ringfold {

void bind_planted_core(nb::module_& m);
void bind_hints_hammer(nb::module_& m);
void bind_relay(nb::module_& m);

}  // namespace ringfold
