// Hints: the agent's writer, and the reader for tests, benches and Python consumers.
#include <nanobind/stl/optional.h>

#include <array>

#include "convert.hpp"
#include "ringfold/hints.hpp"

namespace ringfold {
namespace {

using HintReader = hints::Reader;
using HintWriter = hints::Writer;
using Shares = std::vector<std::uint16_t>;

// (shares, backpressure) of what was read.
nb::tuple to_python(const ringfold_hint& hint) {
  return nb::make_tuple(Shares(hint.shares, hint.shares + hint.paths), static_cast<std::uint32_t>(hint.backpressure));
}

}  // namespace

void bind_hints(nb::module_& m) {
  m.attr("HINT_SLOTS") = RINGFOLD_HINTS_SLOTS;
  m.attr("HINT_MAX_PATHS") = RINGFOLD_HINTS_MOST_PATHS;
  m.attr("HINT_ABI") = RINGFOLD_HINTS_ABI;
  m.attr("HINT_LAST_GENERATION") = RINGFOLD_WORD_GENERATION_MASK;

  m.def("hint_share_of_sup_bw", &ringfold_share_of_sup_bw, "sup_bw"_a, "The classic multiplier as a share of 65535.");
  m.def(
      "hint_word",
      [](std::uint32_t generation, const Shares& shares, std::uint32_t backpressure) {
        return hints::make_word(generation, shares, backpressure);
      },
      "generation"_a, "shares"_a, "backpressure"_a = 0, "The word of a hint for two to four paths.");
  m.def(
      "hint_word_parts",
      [](hints::Word word) {
        Shares shares;
        for (std::uint32_t path = 0; path < ringfold_word_form(word) && path < 4; ++path) {
          shares.push_back(static_cast<std::uint16_t>(ringfold_word_share(word, path)));
        }
        return nb::make_tuple((word & RINGFOLD_WORD_VALID) != 0, ringfold_word_generation(word),
                              ringfold_word_form(word), shares, ringfold_word_backpressure(word));
      },
      "word"_a, "(valid, generation, form, shares, backpressure) of a word.");

  nb::class_<HintWriter> writer(m, "HintWriter", "The one writer of a file of hints.");
  writer.def(
      "__init__",
      [](HintWriter* self, const std::string& path, std::uint64_t stale_after_ns, unsigned mode) {
        try {
          new (self) HintWriter(path, stale_after_ns, mode);
        } catch (const hints::InUse& error) {
          PyErr_SetString(PyExc_BlockingIOError, error.what());
          throw nb::python_error();
        }
      },
      "path"_a, "stale_after_ns"_a, "mode"_a);
  writer.def_prop_ro("generation", &HintWriter::generation, "Counts the lives of the agent.");
  writer.def("slot_generations", &HintWriter::slot_generations, "The generation that each slot had last.");
  writer.def("open", &HintWriter::open, "slot"_a, "generation"_a, "The slot has a new owner, and no advice yet.");
  writer.def(
      "publish",
      [](HintWriter& self, std::uint32_t slot, const Shares& shares, std::uint32_t backpressure, bool is_fixed) {
        self.publish(slot, shares, backpressure, is_fixed ? RINGFOLD_HINT_FIXED : 0);
      },
      "slot"_a, "shares"_a, "backpressure"_a = 0, "is_fixed"_a = false,
      "Advise the owner: a share of 65535 for each path. Fixed shares bind over the whole transfer.");
  writer.def("withdraw", &HintWriter::withdraw, "slot"_a, "No advice any more: the owner's local policy.");
  writer.def("word", &HintWriter::word, "slot"_a, "The word as readers see it.");
  writer.def("beat", &HintWriter::beat, "Say that the agent lives.");
  writer.def("close", &HintWriter::close, "Say that the agent has ended, and let go of the file.");

  nb::class_<HintReader> reader(m, "HintReader", "Reads hints without waiting; what cannot be read is local (None).");
  reader.def(nb::init<std::string>(), "path"_a);
  reader.def(
      "look", [](HintReader& self) { return hints::name_of(self.look(ringfold_hints_now())); },
      "Once per turn: fresh, missing, foreign, other version or stale. All but fresh mean local.");
  reader.def_prop_ro("table_generation", &HintReader::table_generation, "The agent's life that wrote the file, or 0.");
  reader.def("written_ns", &HintReader::written_ns, "slot"_a, "When the agent changed a slot last, or 0.");
  reader.def(
      "word",
      [](const HintReader& self, std::uint32_t slot, std::uint32_t generation) { return self.read(slot, generation); },
      "slot"_a, "generation"_a, "The slot's word for this owner, or 0: local.");
  reader.def(
      "read",
      [](const HintReader& self, std::uint32_t slot, std::uint32_t generation) -> std::optional<nb::tuple> {
        ringfold_hint hint{};
        if (self.read(slot, generation, hint) != RINGFOLD_HINT_READ) return std::nullopt;
        return to_python(hint);
      },
      "slot"_a, "generation"_a, "(shares, backpressure) for this owner, or None: local.");
  reader.def(
      "is_fixed",
      [](const HintReader& self, std::uint32_t slot, std::uint32_t generation) {
        ringfold_hint hint{};
        const bool is_read = self.read(slot, generation, hint) == RINGFOLD_HINT_READ;
        return is_read && (self.flags(slot) & RINGFOLD_HINT_FIXED) != 0;
      },
      "slot"_a, "generation"_a, "Whether there is a hint for this owner whose shares bind.");
}

}  // namespace ringfold
