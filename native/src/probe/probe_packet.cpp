// Bytes of a probe packet, its keyed tag, and the clock that is not the host's.
#include <bit>

#include "ringfold/probe.hpp"

namespace ringfold::probe {
namespace {

constexpr std::uint8_t marker = 0x52, version = 1;
constexpr std::size_t signed_bytes = packet_bytes - 8;

std::uint64_t load(const std::uint8_t* at, int bytes) {
  std::uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= std::uint64_t{at[i]} << (8 * i);
  return value;
}

void store(std::uint8_t* at, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) at[i] = static_cast<std::uint8_t>(value >> (8 * i));
}

struct SipState {
  std::uint64_t v0, v1, v2, v3;

  void rounds(int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1;
      v2 += v3;
      v1 = std::rotl(v1, 13) ^ v0;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 = std::rotl(v0, 32);
      v2 += v1;
      v0 += v3;
      v1 = std::rotl(v1, 17) ^ v2;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 = std::rotl(v2, 32);
    }
  }
  void absorb(std::uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
};

}  // namespace

std::uint64_t siphash(const Key& key, std::span<const std::uint8_t> bytes) {
  const std::uint64_t k0 = load(key.data(), 8), k1 = load(key.data() + 8, 8);
  SipState state{k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d, k0 ^ 0x6c7967656e657261, k1 ^ 0x7465646279746573};
  std::size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) state.absorb(load(bytes.data() + at, 8));
  const std::uint64_t rest = bytes.empty() ? 0 : load(bytes.data() + at, static_cast<int>(bytes.size() - at));
  state.absorb(rest | std::uint64_t{bytes.size() & 0xff} << 56);
  state.v2 ^= 0xff;
  state.rounds(4);
  return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
}

Wire encode(const Key& key, const Packet& packet) {
  Wire out{};
  store(&out[0], static_cast<std::uint64_t>(packet.a), 8);
  store(&out[8], static_cast<std::uint64_t>(packet.b), 8);
  out[16] = marker;
  out[17] = static_cast<std::uint8_t>(static_cast<unsigned>(packet.kind) | (packet.user_stamps ? 8u : 0u) |
                                      (packet.stepped ? 16u : 0u) | unsigned{version} << 5);
  store(&out[18], packet.src, 4);
  store(&out[22], packet.dst, 4);
  store(&out[26], packet.sequence, 6);
  store(&out[signed_bytes], siphash(key, {out.data(), signed_bytes}), 8);
  return out;
}

Reading decode(const Key& key, std::span<const std::uint8_t> bytes, Packet& packet) {
  if (bytes.size() != packet_bytes || bytes[16] != marker || bytes[17] >> 5 != version) return Reading::malformed;
  const unsigned kind = bytes[17] & 7u;
  if (kind < static_cast<unsigned>(Kind::pt1) || kind > static_cast<unsigned>(Kind::pd1)) return Reading::malformed;
  if (siphash(key, bytes.first(signed_bytes)) != load(&bytes[signed_bytes], 8)) return Reading::spoofed;
  packet.kind = static_cast<Kind>(kind);
  packet.user_stamps = (bytes[17] & 8u) != 0;
  packet.stepped = (bytes[17] & 16u) != 0;
  packet.a = static_cast<Ns>(load(&bytes[0], 8));
  packet.b = static_cast<Ns>(load(&bytes[8], 8));
  packet.src = static_cast<Node>(load(&bytes[18], 4));
  packet.dst = static_cast<Node>(load(&bytes[22], 4));
  packet.sequence = load(&bytes[26], 6);
  return Reading::good;
}

// Whole seconds and the rest apart: the product of a long time and a large drift would not fit into 64 bits.
Ns virtual_clock(Ns raw, Ns anchor, Ns offset, std::int64_t drift_ppb) {
  constexpr Ns billion = 1'000'000'000;
  const Ns since = raw - anchor;
  Ns seconds = since / billion, rest = since % billion;
  if (rest < 0) {
    rest += billion;
    --seconds;
  }
  const Ns product = rest * drift_ppb;
  const Ns floored = product / billion - (product % billion < 0 ? 1 : 0);
  return raw + offset + seconds * drift_ppb + floored;
}

}  // namespace ringfold::probe
