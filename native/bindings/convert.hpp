// Between Python's values and ours. Wrong arguments are reported here, before the engine sees them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "ringfold/core.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringfold {

using Array = nb::ndarray<nb::device::cpu, nb::c_contig>;
inline constexpr Ns millisecond = 1'000'000;

Bytes from_python(const nb::bytes& bytes);
nb::bytes to_python(const Bytes& bytes);
nb::dict to_python(const Stats& stats);

// Blocks, held by Python. Ops hold the same without it: their threads must not need the GIL to let go of it.
struct PyBlocks {
  BlocksPtr blocks;
};

// A collective as Python requests it. The arrays are read and written until the op has ended.
struct OpRequest {
  int kind = 0;
  int reduce_op = 0;
  std::uint64_t tag = 0;
  int root = 0;
  std::vector<Array> source;
  std::optional<std::vector<Array>> target;
  std::vector<int> dtypes;
  int retry = 0;
  Ns timeout = 0;
  int quantisation = 0;
  bool again = false;
  bool contribute = true;
  BlocksPtr blocks{};
  std::vector<nb::object> source_objects{};  // what Python passed in
  std::optional<std::vector<nb::object>> target_objects{};
};

// The same as the engine takes it. The arrays stay alive as long as this does.
struct Call {
  OpSpec spec;
  std::vector<Array> arrays;
};

// Checks the request, and throws nb::value_error with what is wrong.
Call make_call(const OpRequest& request);

// A connection that becomes a lane.
struct LanePromotion {
  ConnId conn = 0;
  bool outgoing = false;
  PeerId peer = 0;
  std::uint32_t lane = 0;
  Sharing sharing;
};

void bind_structs(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_hash(nb::module_& m);
void bind_core(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_probe(nb::module_& m);
void bind_fit(nb::module_& m);
void bind_hints(nb::module_& m);

}  // namespace ringfold
