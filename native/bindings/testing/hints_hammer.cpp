// Hammers for hints, as functions of the writer and the reader that the release module has bound.
#include "hints_hammer.hpp"

#include "testing.hpp"

namespace ringfold {

void bind_hints_hammer(nb::module_& m) {
  m.def("tear_hint", &hints::Writer::tear, "writer"_a, "slot"_a,
        "As if the writer was killed in the middle of a write.");
  m.def("hammer_hint_writes", &hints::hammer_writes, "writer"_a, "slots"_a, "rounds"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "Publish patterns without pause (0 rounds: until the process is killed).");
  m.def(
      "hammer_hint_reads",
      [](hints::Reader& reader, std::uint32_t slots, const std::vector<std::uint32_t>& generations,
         std::uint64_t reads) {
        hints::Hammered out;
        {
          nb::gil_scoped_release free;
          out = hints::hammer_reads(reader, slots, generations, reads);
        }
        nb::dict found;
        found["hints"] = out.hints;
        found["local"] = out.local;
        found["busy"] = out.busy;
        found["torn"] = out.torn;
        found["nanoseconds"] = out.nanoseconds;
        return found;
      },
      "reader"_a, "slots"_a, "generations"_a, "reads"_a,
      "Read patterns without pause, and count those whose parts disagree.");
  m.def("hint_read_cost_ns", &hints::read_cost_ns, "reader"_a, "slot"_a, "generation"_a, "reads"_a,
        nb::call_guard<nb::gil_scoped_release>(), "Nanoseconds per read of a word.");
}

}  // namespace ringfold
