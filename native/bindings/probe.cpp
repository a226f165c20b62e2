// The prober: commands release the GIL, and a window's rows become NumPy arrays without being touched by Python.
#include <nanobind/stl/array.h>

#include <stdexcept>

#include "convert.hpp"
#include "ringfold/probe_socket.hpp"

namespace ringfold {
namespace {

using probe::Key;
using probe::Node;
using RawNeighbour = std::tuple<Node, std::string, std::uint16_t>;

Key key_from(const nb::bytes& bytes) {
  Key key{};
  if (bytes.size() != key.size()) throw nb::value_error("a probe key has 16 bytes");
  std::memcpy(key.data(), bytes.c_str(), key.size());
  return key;
}

std::vector<probe::Neighbour> neighbours_from(const std::vector<RawNeighbour>& raw) {
  std::vector<probe::Neighbour> out;
  out.reserve(raw.size());
  for (const auto& [node, host, port] : raw) out.push_back({node, host, port});
  return out;
}

// Hands the memory of a vector over to NumPy.
template <typename Scalar, typename Vector>
nb::object array_of(Vector&& vector, std::initializer_list<std::size_t> shape) {
  auto* kept = new std::decay_t<Vector>(std::forward<Vector>(vector));
  nb::capsule owner(kept, [](void* each) noexcept { delete static_cast<std::decay_t<Vector>*>(each); });
  return nb::cast(nb::ndarray<nb::numpy, Scalar>(kept->data(), shape, owner));
}

// A window as Python gets it: its rows and marks are arrays.
struct PyWindow {
  Node dst;
  std::int64_t begin, end;
  nb::object rows, kept;
  std::uint64_t sent, lost, duplicates, filtered;
  std::int64_t threshold;
  bool user_stamps;
  std::string stepped;
};

std::vector<PyWindow> to_python(std::vector<probe::Window>&& windows) {
  static_assert(sizeof(probe::Row) == 8 * sizeof(std::int64_t));
  std::vector<PyWindow> out;
  for (probe::Window& window : windows) {
    const std::size_t count = window.rows.size();
    out.push_back({window.dst, window.begin, window.end, array_of<std::int64_t>(std::move(window.rows), {count, 8}),
                   array_of<std::uint8_t>(std::move(window.kept), {count}), window.sent, window.lost, window.duplicates,
                   window.filtered, window.threshold, window.user_stamps, window.stepped});
  }
  return out;
}

void bind_window(nb::module_& m) {
  nb::class_<PyWindow> window(m, "ProbeWindow", "What a window holds about one out-edge.");
  window.def_ro("dst", &PyWindow::dst);
  window.def_ro("begin_ns", &PyWindow::begin);
  window.def_ro("end_ns", &PyWindow::end);
  window.def_prop_ro(
      "exchanges", [](const PyWindow& self) { return self.rows; },
      nb::sig("def exchanges(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, 8))]"), "Eight stamps each.");
  window.def_prop_ro(
      "kept", [](const PyWindow& self) { return self.kept; },
      nb::sig("def kept(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]"), "Bits by exchange.");
  window.def_ro("sent", &PyWindow::sent);
  window.def_ro("lost", &PyWindow::lost);
  window.def_ro("duplicates", &PyWindow::duplicates);
  window.def_ro("filtered", &PyWindow::filtered);
  window.def_ro("threshold_ns", &PyWindow::threshold);
  window.def_ro("user_stamps", &PyWindow::user_stamps);
  window.def_ro("stepped", &PyWindow::stepped);
}

nb::dict to_python(const probe::Stats& stats) {
  nb::dict out;
  out["sent"] = stats.sent;
  out["received"] = stats.core.received;
  out["complete"] = stats.core.complete;
  out["malformed"] = stats.core.malformed;
  out["spoofed"] = stats.core.spoofed;
  out["strangers"] = stats.core.strangers;
  out["replayed"] = stats.core.replayed;
  out["duplicates"] = stats.core.duplicates;
  out["refused"] = stats.core.refused;
  out["unstamped"] = stats.core.unstamped;
  out["sequence"] = stats.core.sequence;
  out["send_errors"] = stats.send_errors;
  out["would_block"] = stats.would_block;
  out["icmp_errors"] = stats.icmp_errors;
  out["resyncs"] = stats.resyncs;
  out["wakes"] = stats.wakes;
  out["ticks"] = stats.core.ticks;
  out["ticks_late"] = stats.core.ticks_late;
  out["cpu_ns"] = stats.cpu;
  out["clock_noise_ns"] = stats.clock_noise;
  out["clock_bends"] = stats.clock_bends;
  out["user_stamps"] = stats.user_stamps;
  return out;
}

}  // namespace

void bind_probe(nb::module_& m) {
  m.def("probe_virtual", &probe::virtual_clock, "raw_ns"_a, "anchor_ns"_a, "offset_ns"_a, "drift_ppb"_a,
        "What a virtual clock shows at a raw time.");
  m.def(
      "probe_siphash",
      [](const nb::bytes& key, const nb::bytes& bytes) {
        return probe::siphash(key_from(key), {reinterpret_cast<const std::uint8_t*>(bytes.c_str()), bytes.size()});
      },
      "key"_a, "bytes"_a, "SipHash-2-4.");
  m.def(
      "probe_packet",
      [](const nb::bytes& key, int kind, Node src, Node dst, std::uint64_t sequence, std::int64_t a, std::int64_t b) {
        if (kind < 1 || kind > 5) throw nb::value_error("kinds are 1 to 5");
        const probe::Packet packet{
            .kind = static_cast<probe::Kind>(kind), .src = src, .dst = dst, .sequence = sequence, .a = a, .b = b};
        const probe::Wire wire = probe::encode(key_from(key), packet);
        return nb::bytes(reinterpret_cast<const char*>(wire.data()), wire.size());
      },
      "key"_a, "kind"_a, "src"_a, "dst"_a, "sequence"_a, "a"_a = 0, "b"_a = 0,
      "The bytes of a probe packet (kind 1 to 5: Pt1, Pt2, Pr1, Pr2, Pd1).");

  bind_window(m);
  nb::class_<probe::Prober> cls(m, "Prober", "The probe socket of one node, with a thread of its own.");
  cls.def(
      "__init__",
      [](probe::Prober* self, Node node, const std::string& host, std::uint16_t port, std::int64_t anchor_ns,
         std::int64_t offset_ns, std::int64_t drift_ppb, bool user_stamps) {
        new (self) probe::Prober({node, host, port, anchor_ns, offset_ns, drift_ppb, user_stamps});
      },
      nb::kw_only(), "node"_a, "host"_a, "port"_a, "anchor_ns"_a, "offset_ns"_a, "drift_ppb"_a, "user_stamps"_a);
  cls.def_prop_ro("port", &probe::Prober::port, "The UDP port.");
  cls.def(
      "configure",
      [](probe::Prober& self, const nb::bytes& key, const std::vector<RawNeighbour>& out,
         const std::vector<RawNeighbour>& into) {
        const Key parsed = key_from(key);
        const auto out_list = neighbours_from(out), in_list = neighbours_from(into);
        nb::gil_scoped_release free;
        self.configure(parsed, out_list, in_list);
      },
      "key"_a, "out"_a, "into"_a, "The nodes to probe and the nodes to answer, each (node, address, port).");
  cls.def(
      "resume", [](probe::Prober& self, std::int64_t gap_ns, std::int64_t pause_ns) { self.resume(gap_ns, pause_ns); },
      "gap_ns"_a, "pause_ns"_a, nb::call_guard<nb::gil_scoped_release>(), "Begin a window, and probe.");
  cls.def("pause", &probe::Prober::pause, nb::call_guard<nb::gil_scoped_release>(), "Send no more probes; answer.");
  cls.def(
      "rotate",
      [](probe::Prober& self) {
        std::vector<probe::Window> windows;
        {
          nb::gil_scoped_release free;
          windows = self.rotate();
        }
        return to_python(std::move(windows));
      },
      "Close the window and begin the next; the closed one, by edge.");
  cls.def(
      "so_far",
      [](probe::Prober& self) {
        std::vector<probe::Window> windows;
        {
          nb::gil_scoped_release free;
          windows = self.so_far();
        }
        return to_python(std::move(windows));
      },
      "The window as `rotate` would give it now; it goes on.");
  cls.def(
      "peek", [](probe::Prober& self, std::size_t most) { return to_python(self.peek(most)); }, "most"_a,
      "The newest exchanges of the open window, unfiltered, as `rotate` gives them.");
  cls.def("rename", &probe::Prober::rename, "node"_a, "The node has another number from now on.");
  cls.def("stats", [](probe::Prober& self) { return to_python(self.stats()); }, "Counts since the beginning.");
  cls.def("now", [](probe::Prober& self) { return self.to_node(probe::raw_now()); }, "The node's clock.");
  cls.def("utc", &probe::Prober::utc, "CLOCK_REALTIME minus the node's clock.");
  cls.def("pretend_step", &probe::Prober::pretend_step, "step_ns"_a, "As if the time of day had been set.");
  cls.def("shutdown", &probe::Prober::shutdown, nb::call_guard<nb::gil_scoped_release>());
  cls.def("before_fork", &probe::Prober::before_fork, nb::call_guard<nb::gil_scoped_release>());
  cls.def("forked_parent", &probe::Prober::forked_parent);
  cls.def("forked_child", &probe::Prober::forked_child);
  m.def("probe_raw_now", &probe::raw_now, "CLOCK_MONOTONIC_RAW.");
}

}  // namespace ringfold
