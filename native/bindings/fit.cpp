#include "ringfold/fit.hpp"

#include "convert.hpp"

namespace ringfold {

namespace {

using fitting::Estimator;
using Stamps = nb::ndarray<const std::int64_t, nb::shape<-1, fitting::columns>, nb::device::cpu, nb::c_contig>;
using Kept = nb::ndarray<const std::uint8_t, nb::shape<-1>, nb::device::cpu, nb::c_contig>;

Estimator by_name(const std::string& name) {
  if (name == "auto") return Estimator::automatic;
  if (name == "quantile") return Estimator::quantile;
  if (name == "hull") return Estimator::hull;
  if (name == "svm") return Estimator::svm;
  if (name == "least-squares") return Estimator::least_squares;
  if (name == "min-rtt") return Estimator::min_rtt;
  throw nb::value_error("there is no such estimator");
}

nb::dict fit(const Stamps& stamps, const Kept& kept, const std::string& estimator) {
  if (stamps.shape(0) != kept.shape(0)) throw nb::value_error("one flag is needed for each row of stamps");
  const Estimator which = by_name(estimator);
  fitting::Result found;
  {
    nb::gil_scoped_release released;
    found = fitting::fit({stamps.data(), kept.data(), stamps.shape(0)}, which);
  }
  nb::dict fields;
  fields["pairs"] = found.pairs;
  fields["delay_min_ns"] = found.delay_min;
  fields["delay_p50_ns"] = found.delay_p50;
  fields["delay_p99_ns"] = found.delay_p99;
  fields["refused"] = found.refused;
  if (!found.refused.empty()) return fields;
  fields["t0_ns"] = found.t0;
  fields["half_ns"] = found.half;
  fields["alpha"] = found.alpha;
  fields["beta_ns"] = found.beta;
  fields["sigma_ns"] = found.sigma;
  fields["sigma_alpha"] = found.sigma_alpha;
  fields["low"] = nb::make_tuple(found.low[0], found.low[1], found.low[2]);
  fields["high"] = nb::make_tuple(found.high[0], found.high[1], found.high[2]);
  fields["residual_ns"] = found.residual;
  fields["estimator"] = found.estimator;
  fields["why"] = found.why;
  return fields;
}

}  // namespace

void bind_fit(nb::module_& m) {
  m.def("fit_edge", &fit, "exchanges"_a.noconvert(), "kept"_a.noconvert(), "estimator"_a,
        "The line through a window of exchanges, as the fields of an EdgeFit that the stamps determine.");
}

}  // namespace ringfold
