// The parts of probing: packets and their tag, virtual clocks, the map between clocks, the filter.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>

#include "check.hpp"
#include "ringfold/probe.hpp"

using namespace ringfold;
using namespace ringfold::probe;

namespace {

constexpr Ns us = 1'000, ms = 1'000'000, s = 1'000'000'000;

Key counting_key() {
  Key key{};
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::uint8_t>(i);
  return key;
}

// Packets

TEST(siphash_gives_the_known_values) {
  const Key key = counting_key();
  std::vector<std::uint8_t> bytes;
  const std::map<std::size_t, std::uint64_t> known{
      {0, 0x726fdb47dd0e0e31}, {1, 0x74f839c593dc67fd}, {8, 0x93f5f5799a932462}, {15, 0xa129ca6149be45e5}};
  for (std::size_t i = 0; i < 16; ++i) {
    if (known.contains(i)) CHECK_MESSAGE(siphash(key, bytes) == known.at(i), "SipHash of %zu bytes", i);
    bytes.push_back(static_cast<std::uint8_t>(i));
  }
}

Packet some_packet() {
  return {.kind = Kind::pr2,
          .user_stamps = true,
          .stepped = false,
          .src = 0xfedcba98,
          .dst = 7,
          .sequence = 0xabcdef012345,
          .a = 1'234'567'890'123'456'789,
          .b = -5};
}

TEST(a_packet_comes_out_as_it_went_in) {
  for (int kind = 1; kind <= 5; ++kind) {
    Packet in = some_packet(), out;
    in.kind = static_cast<Kind>(kind);
    in.stepped = kind % 2 == 0;
    const Wire wire = encode(counting_key(), in);
    CHECK(decode(counting_key(), wire, out) == Reading::good);
    CHECK(out.kind == in.kind && out.user_stamps == in.user_stamps && out.stepped == in.stepped);
    CHECK(out.src == in.src && out.dst == in.dst && out.sequence == in.sequence && out.a == in.a && out.b == in.b);
  }
}

TEST(a_change_of_any_bit_is_refused) {
  const Wire wire = encode(counting_key(), some_packet());
  for (std::size_t bit = 0; bit < 8 * wire.size(); ++bit) {
    Wire changed = wire;
    changed[bit / 8] ^= static_cast<std::uint8_t>(1u << bit % 8);
    Packet out;
    CHECK_MESSAGE(decode(counting_key(), changed, out) != Reading::good, "bit %zu", bit);
  }
  Key other = counting_key();
  other[15] ^= 1;
  Packet out;
  CHECK(decode(other, wire, out) == Reading::spoofed);
}

TEST(another_size_or_kind_is_malformed) {
  const Wire wire = encode(counting_key(), some_packet());
  Packet out;
  std::vector<std::uint8_t> longer(wire.begin(), wire.end());
  longer.push_back(0);
  CHECK(decode(counting_key(), longer, out) == Reading::malformed);
  for (std::size_t size = 0; size < wire.size(); ++size) {
    CHECK(decode(counting_key(), {wire.data(), size}, out) == Reading::malformed);
  }
  for (const int kind : {0, 6, 7}) {
    Packet odd = some_packet();
    odd.kind = static_cast<Kind>(kind);
    CHECK(decode(counting_key(), encode(counting_key(), odd), out) == Reading::malformed);
  }
}

// Clocks

TEST(a_virtual_clock_is_exact) {
  std::mt19937_64 rng(5);
  for (int i = 0; i < 20'000; ++i) {
    const Ns raw = static_cast<Ns>(rng() >> 3), anchor = static_cast<Ns>(rng() >> 3),
             offset = static_cast<Ns>(rng() >> 24);
    const std::int64_t drift = static_cast<std::int64_t>(rng() % 2'000'000) - 1'000'000;
    const __int128 product = static_cast<__int128>(raw - anchor) * drift;
    __int128 quotient = product / s;
    if (product % s < 0) --quotient;
    CHECK(virtual_clock(raw, anchor, offset, drift) == static_cast<Ns>(raw + offset + quotient));
  }
}

// A host whose time of day runs off by `rate` and was `lead` ahead at raw time 0.
struct Host {
  std::mt19937_64 rng{3};
  double rate = 12e-6;
  Ns lead = 1'700'000'000 * s;
  Ns turned = 0;  // since when the rate holds

  Ns real(Ns raw) const { return raw + lead + static_cast<Ns>(std::llround(rate * static_cast<double>(raw - turned))); }
  void bend(Ns raw, double next) {
    lead = real(raw) - raw;
    turned = raw;
    rate = next;
  }
  void sample(ClockMap& map, Ns raw) {
    const Ns width = 40 + static_cast<Ns>(rng() % 20), jitter = static_cast<Ns>(rng() % 11) - 5;
    map.add(raw - width / 2, real(raw + jitter), raw + width - width / 2);
  }
};

TEST(the_map_is_better_than_its_samples) {
  Host host;
  ClockMap map;
  double squares = 0;
  int count = 0;
  for (Ns raw = 5 * s; raw < 15 * s; raw += 2 * ms) {
    host.sample(map, raw);
    if (raw < 6 * s) continue;
    for (Ns before = 0; before < 2 * ms; before += 500 * us) {
      const double off = static_cast<double>(map.to_raw(host.real(raw - before)) - (raw - before));
      squares += off * off;
      ++count;
      CHECK(map.step() == 0);
    }
  }
  const double rms = std::sqrt(squares / count);
  CHECK_MESSAGE(rms < 2.0, "%.2f ns off", rms);  // the samples: 3.2
  CHECK(map.noise() > 2 && map.noise() < 5);
}

// At the start, wakes come close together, and a thread that did not get its core finds stamps older than its samples.
TEST(the_first_samples_are_not_trusted_with_the_slope) {
  Ns worst = 0;
  for (unsigned seed = 1; seed <= 200; ++seed) {
    Host host;
    host.rng.seed(seed);
    ClockMap map(10e-6);  // known, but not quite
    Ns raw = 5 * s;
    for (int i = 0; i < 40; ++i) {
      raw += i < 10 ? 20 * us : ms;
      host.sample(map, raw);
      CHECK(map.step() == 0 && map.bends() == 0);
      worst = std::max(worst, std::abs(map.to_raw(host.real(raw - 5 * ms)) - (raw - 5 * ms)));
    }
  }
  CHECK_MESSAGE(worst < 60, "%lld ns off", static_cast<long long>(worst));
}

TEST(a_bend_is_followed_and_is_no_step) {
  Host host;
  ClockMap map;
  Ns worst = 0;
  for (Ns raw = 5 * s; raw < 7 * s; raw += 2 * ms) {
    if (raw == 6 * s) host.bend(raw, -100e-6);
    host.sample(map, raw);
    CHECK(map.step() == 0);
    if (raw > 6 * s + 4 * ms) worst = std::max(worst, std::abs(map.to_raw(host.real(raw - ms)) - (raw - ms)));
  }
  CHECK(map.bends() >= 1);
  CHECK_MESSAGE(worst < 15, "%lld ns off", static_cast<long long>(worst));
}

TEST(a_step_is_seen_once_and_measured) {
  for (const Ns step : {ms, -ms, 100 * us, -10 * us, 3'600 * s}) {
    Host host;
    ClockMap map;
    int steps = 0;
    for (Ns raw = 5 * s; raw < 7 * s; raw += 2 * ms) {
      if (raw == 6 * s) host.lead += step;
      host.sample(map, raw);
      if (map.step() == 0) continue;
      ++steps;
      CHECK_MESSAGE(std::abs(map.step() - step) < 40, "%lld seen", static_cast<long long>(map.step()));
    }
    CHECK(steps == 1);
    CHECK(std::abs(map.to_raw(host.real(7 * s - ms)) - (7 * s - ms)) < 15);
  }
}

// The filter

Window window_of(std::size_t count, const std::function<Ns(std::size_t)>& change) {
  Window window;
  for (std::size_t i = 0; i < count; ++i) {
    const Ns t = static_cast<Ns>(i + 1) * 4 * ms;
    window.rows.push_back(
        {t, t + 9, t + 800 * us, t + 9 + 800 * us + change(i), t, t + 9, t + 800 * us, t + 9 + 800 * us});
  }
  return window;
}

std::size_t forward_kept(const Window& window) {
  return static_cast<std::size_t>(
      std::count_if(window.kept.begin(), window.kept.end(), [](auto each) { return each & 1; }));
}

TEST(pairs_that_met_a_queue_are_filtered) {
  Window window = window_of(1'000, [](std::size_t i) { return i % 5 == 0 ? 3 * us : static_cast<Ns>(i % 7) * 10; });
  filter(window, 800 * us);
  CHECK(forward_kept(window) == 800);
  CHECK(window.filtered == 200);
  CHECK(window.threshold >= 100 && window.threshold < us);
  CHECK(std::all_of(window.kept.begin(), window.kept.end(), [](auto each) { return (each & 2) != 0; }));
}

TEST(drift_between_the_clocks_filters_nothing) {
  Window window = window_of(1'000, [](std::size_t i) { return 160 * us + static_cast<Ns>(i % 3); });
  filter(window, 800 * us);
  CHECK(forward_kept(window) == 1'000);
}

TEST(a_bad_path_keeps_its_best_quarter) {
  std::mt19937 rng(2);
  Window window = window_of(1'000, [&](std::size_t) { return static_cast<Ns>(rng() % 20'000) * us; });
  filter(window, 800 * us);
  CHECK_MESSAGE(forward_kept(window) >= 250 && forward_kept(window) < 300, "%zu kept", forward_kept(window));
  Window small = window_of(15, [&](std::size_t) { return static_cast<Ns>(rng() % 20'000) * us; });
  filter(small, 800 * us);
  CHECK(forward_kept(small) == 15);
}

TEST(a_pair_that_is_not_whole_is_neither_kept_nor_filtered) {
  Window window = window_of(100, [](std::size_t) { return 0; });
  for (Row& row : window.rows) row[7] = 0;
  filter(window, 800 * us);
  CHECK(window.filtered == 0);
  CHECK(std::all_of(window.kept.begin(), window.kept.end(), [](auto each) { return each == 1; }));
}

TEST(absurd_stamps_do_no_harm) {
  constexpr Ns most = std::numeric_limits<Ns>::max(), least = std::numeric_limits<Ns>::min();
  Window window = window_of(100, [](std::size_t) { return 0; });
  for (std::size_t i = 0; i < 100; ++i) window.rows[i] = {most, least, least, most, least, most, most, least};
  window.rows[0] = {1, most, 2, least, 3, 4, 5, 6};
  filter(window, 800 * us);
  CHECK(window.kept.size() == 100);
}

}  // namespace
