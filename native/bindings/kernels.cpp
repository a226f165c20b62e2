#include "ringfold/kernels.hpp"

#include "convert.hpp"

namespace ringfold {

void bind_kernels(nb::module_& m) {
  m.def("cpu_level", &kernels::cpu_level, "Which kernels run here: avx512, avx2 or generic.");
  m.def("set_cpu_level", &kernels::set_cpu_level, "level"_a, "For tests: choose the kernels; False if the CPU cannot.");
  m.def(
      "crc32c", [](const nb::bytes& bytes, std::uint32_t seed) { return crc32c(bytes.c_str(), bytes.size(), seed); },
      "data"_a, "seed"_a = 0, "CRC-32C, chained from `seed`.");
  m.def(
      "reduce",
      [](int dtype, int op, const Array& target, const Array& a, const Array& b) {
        if (dtype < 0 || dtype > 11 || op < 0 || op > 4) throw nb::value_error("unknown dtype or op");
        if (target.nbytes() != a.nbytes() || a.nbytes() != b.nbytes()) throw nb::value_error("sizes differ");
        const auto type = static_cast<kernels::DType>(dtype);
        kernels::reduce(type, static_cast<kernels::ReduceOp>(op), target.data(), a.data(), b.data(),
                        a.nbytes() / kernels::item_bytes(type));
      },
      "dtype"_a, "reduce_op"_a, "target"_a.noconvert(), "a"_a.noconvert(), "b"_a.noconvert(),
      "target = a op b, elementwise.");
  m.def(
      "divide",
      [](int dtype, const Array& target, std::uint32_t divisor) {
        if (dtype < 0 || dtype > 11 || divisor == 0) throw nb::value_error("unknown dtype, or division by zero");
        const auto type = static_cast<kernels::DType>(dtype);
        kernels::divide(type, target.data(), divisor, target.nbytes() / kernels::item_bytes(type));
      },
      "dtype"_a, "target"_a.noconvert(), "divisor"_a, "target /= divisor, elementwise.");
}

}  // namespace ringfold
