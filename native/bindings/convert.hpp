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
using RawVerdict = std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, bool, std::uint64_t,
                              std::optional<std::vector<std::optional<nb::bytes>>>, int, nb::bytes>;

inline constexpr Ns millisecond = 1'000'000;

Bytes from_python(const nb::bytes& bytes);
std::vector<Verdict> from_python(const std::vector<RawVerdict>& raw);
nb::bytes to_python(const Bytes& bytes);
nb::object to_python(const std::optional<Payloads>& payloads);
nb::tuple to_python(const Event& event);
nb::tuple to_python(const OpResult& result);
nb::list to_python(const std::vector<SealedOp>& ops);
nb::dict to_python(const Stats& stats);

// What Python hands over for one op. The arrays stay alive as long as this does.
struct Call {
  OpSpec spec;
  std::vector<Array> arrays;
};

Call make_call(int kind, int reduce_op, std::uint64_t tag, int root, const std::vector<Array>& source,
               const std::optional<std::vector<Array>>& target, const std::vector<int>& dtypes, int retry, Ns timeout,
               int quantisation);
EpochSpec epoch_spec(std::uint32_t epoch, std::uint32_t rank, std::uint32_t size, std::vector<PeerId> members,
                     bool by_master, std::size_t small_bytes, std::size_t segment_bytes, std::uint32_t peers_here);

void bind_kernels(nb::module_& m);
void bind_hash(nb::module_& m);
void bind_core(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_probe(nb::module_& m);
void bind_fit(nb::module_& m);
void bind_hints(nb::module_& m);

}  // namespace ringfold
