// The relay of the lab's cables with latency and loss. Every call releases the GIL: the relay's thread may hold the
// lock for a turn.
#include "relay.hpp"

#include "testing.hpp"

namespace ringfold {
namespace {

nb::dict to_python(const relay::LineStats& stats) {
  nb::dict out;
  out["packets"] = stats.packets;
  out["bytes"] = stats.bytes;
  out["lost"] = stats.lost;
  out["overflowed"] = stats.overflowed;
  out["refused"] = stats.refused;
  out["on_the_way_bytes"] = stats.in_flight;
  out["latest_ns"] = stats.latest;
  return out;
}

void check(std::int64_t delay_ns, double loss) {
  if (delay_ns < 0) throw nb::value_error("a delay is not negative");
  if (!(loss >= 0 && loss <= 1)) throw nb::value_error("a loss is 0 to 1");
}

}  // namespace

void bind_relay(nb::module_& m) {
  using relay::Relay;
  nb::class_<Relay> cls(m, "Relay",
                        "Cables with a delay and a loss between pairs of descriptors, and a thread for them.");
  cls.def(nb::init<>(), nb::call_guard<nb::gil_scoped_release>());
  cls.def(
      "add",
      [](Relay& self, int near, int far, std::int64_t delay_ns, double loss, std::uint64_t seed) {
        check(delay_ns, loss);
        nb::gil_scoped_release free;
        return self.add(near, far, delay_ns, loss, seed);
      },
      "near"_a, "far"_a, "delay_ns"_a, "loss"_a, "seed"_a,
      "Join two descriptors by a cable; its number. What goes from `near` to `far` may get lost.");
  cls.def(
      "set",
      [](Relay& self, std::size_t cable, std::int64_t delay_ns, double loss) {
        check(delay_ns, loss);
        nb::gil_scoped_release free;
        self.set(cable, delay_ns, loss);
      },
      "cable"_a, "delay_ns"_a, "loss"_a, "Another delay (each direction) and loss, for packets from now on.");
  cls.def(
      "stats",
      [](Relay& self, std::size_t cable) {
        std::pair<relay::LineStats, relay::LineStats> both;
        {
          nb::gil_scoped_release free;
          both = self.stats(cable);
        }
        return std::pair(to_python(both.first), to_python(both.second));
      },
      "cable"_a, "Counts of what went from `near` to `far`, and back.");
  cls.def("close", &Relay::close, nb::call_guard<nb::gil_scoped_release>(),
          "End the thread. What is in flight is lost. Safe to call twice.");
}

}  // namespace ringfold
