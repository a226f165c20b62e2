#include "ringfold/kernels.hpp"
#include "ringfold/quantize.hpp"

#include "convert.hpp"

namespace ringfold {
namespace {

// A scheme and a dtype that go together, and the bytes that `count` elements have then.
struct Quantiser {
  quantize::Scheme scheme;
  kernels::DType dtype;

  Quantiser(int scheme, int dtype)
      : scheme(static_cast<quantize::Scheme>(scheme)), dtype(static_cast<kernels::DType>(dtype)) {
    const bool known = scheme > 0 && scheme < static_cast<int>(quantize::scheme_count) && dtype >= 0 && dtype <= 11;
    if (!known || !quantize::supports(this->dtype)) throw nb::value_error("unknown scheme, or a dtype that has none");
  }
  std::size_t count(const Array& values) const { return values.nbytes() / kernels::item_bytes(dtype); }
  void check(const Array& encoded, const Array& values) const {
    const bool whole = values.nbytes() % kernels::item_bytes(dtype) == 0;
    if (!whole || encoded.nbytes() != quantize::encoded_bytes(scheme, dtype, count(values))) {
      throw nb::value_error("sizes do not agree: ask quantized_bytes()");
    }
  }
};

}  // namespace

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
  m.def(
      "quantized_bytes",
      [](int scheme, int dtype, std::size_t count) {
        const Quantiser with(scheme, dtype);
        return quantize::encoded_bytes(with.scheme, with.dtype, count);
      },
      "scheme"_a, "dtype"_a, "count"_a, "How many bytes `count` elements have on the wire.");
  m.def(
      "quantize",
      [](int scheme, int dtype, const Array& encoded, const Array& values) {
        const Quantiser with(scheme, dtype);
        with.check(encoded, values);
        nb::gil_scoped_release free;
        quantize::encode(with.scheme, with.dtype, encoded.data(), values.data(), with.count(values));
      },
      "scheme"_a, "dtype"_a, "encoded"_a.noconvert(), "values"_a.noconvert(), "Encode `values` as they travel.");
  m.def(
      "dequantize",
      [](int scheme, int dtype, const Array& values, const Array& encoded) {
        const Quantiser with(scheme, dtype);
        with.check(encoded, values);
        nb::gil_scoped_release free;
        quantize::decode(with.scheme, with.dtype, values.data(), encoded.data(), with.count(values));
      },
      "scheme"_a, "dtype"_a, "values"_a.noconvert(), "encoded"_a.noconvert(), "Decode what `quantize` made.");
}

}  // namespace ringfold
