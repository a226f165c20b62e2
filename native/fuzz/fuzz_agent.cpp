// The client of the agent in C (ringfold_agent.h): any bytes in place of an agent's responses, cut anywhere.
//
// Checked: bytes that are no responses end the connection and nothing else; a flow has a place only while there is a
// connection; what is queued stays bounded, and consists of whole frames; flows outlive every connection; a split takes
// a path that exists.
#include "fuzz.hpp"
#include "ringfold_agent.h"

using fuzz::Bytes;
using fuzz::Input;

namespace {

constexpr std::size_t max_flows = 6;

Bytes response(Input& input, const ringfold_agent_core& core) {
  const std::uint32_t index = static_cast<std::uint32_t>(input.below(max_flows));
  const bool is_known = index < core.count;
  const std::uint8_t type = input.number<std::uint8_t>(
      {RINGFOLD_AGENT_REGISTERED, RINGFOLD_AGENT_WELCOME, RINGFOLD_AGENT_REFUSED, RINGFOLD_AGENT_DEREGISTERED});
  const std::uint32_t request = input.number<std::uint32_t>({is_known ? core.entries[index].request : index, 0});
  const std::uint64_t connection = input.number<std::uint64_t>({is_known ? core.entries[index].connection : index});
  std::size_t rest = type == RINGFOLD_AGENT_REGISTERED ? 8 : type == RINGFOLD_AGENT_REFUSED ? 112 : 0;
  if (input.chance(16)) rest = input.below(600);
  Bytes body;
  ringfold::put(body, input.number<std::uint8_t>({RINGFOLD_AGENT_MARK}));
  ringfold::put(body, input.number<std::uint8_t>({RINGFOLD_AGENT_VERSION}));
  ringfold::put(body, type);
  ringfold::put(body, input.number<std::uint8_t>({0, RINGFOLD_REFUSAL_QUOTA, RINGFOLD_REFUSAL_UNKNOWN}));
  ringfold::put(body, request);
  ringfold::put(body, connection);
  const Bytes more = input.bytes(rest);
  body.insert(body.end(), more.begin(), more.end());
  const auto length = static_cast<std::uint32_t>(body.size() + 1);
  return fuzz::control_frame(input.number<std::uint32_t>({length}), input.number<std::uint8_t>({0}), body);
}

void check(const ringfold_agent_core& core) {
  std::size_t at = core.out_begin;
  REQUIRE(core.out_end - core.out_begin <= RINGFOLD_AGENT_MAX_QUEUED, "%zu bytes are queued", core.out_end);
  while (at < core.out_end) {
    const std::uint32_t length = ringfold_agent_get32(core.out + at);
    REQUIRE(length > RINGFOLD_AGENT_HEAD_BYTES && length <= 2048, "a frame of %u bytes", length);
    REQUIRE(core.out[at + 5] == RINGFOLD_AGENT_MARK, "a frame without the mark");
    at += 4 + length;
  }
  REQUIRE(at == core.out_end, "half a frame is queued");
  for (std::uint32_t each = 0; each < core.count; ++each) {
    const ringfold_agent_entry& entry = core.entries[each];
    REQUIRE(core.state != RINGFOLD_AGENT_AWAY || entry.state <= RINGFOLD_FLOW_WAITING, "a place without a connection");
    REQUIRE(std::memchr(entry.text, 0, sizeof entry.text) != nullptr, "a text without an end");
  }
}

void split(Input& input) {
  ringfold_split split{};
  ringfold_hint hint{};
  hint.paths = static_cast<std::uint16_t>(2 + input.below(15));
  hint.backpressure = input.value<std::uint16_t>();
  for (std::uint16_t& share : hint.shares) share = input.value<std::uint16_t>();
  for (int piece = 0; piece < 8; ++piece) {
    const std::uint32_t path = ringfold_split_next(&split, &hint, input.value<std::uint32_t>());
    REQUIRE(path < hint.paths, "path %u of %u", path, hint.paths);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  ringfold_agent_core core;
  ringfold_agent_flow flow;
  std::uint64_t now = 1;
  std::size_t flows = 0;
  ringfold_agent_core_init(&core, "fuzz");
  REQUIRE(ringfold_agent_flow_init(&flow, "10.0.0.1", "10.0.0.2") == 0, "an address");
  REQUIRE(ringfold_agent_flow_add_path(&flow, "10.0.0.1", "10.0.0.2") == 0, "a path");
  REQUIRE(ringfold_agent_flow_add_path(&flow, "fe80::1%eth0", "::1") == 0, "a path");
  for (int step = 0; step < 400 && !input.is_used_up(); ++step) {
    const int id = static_cast<int>(input.below(max_flows));
    const std::uint64_t rates[2] = {1, 2};
    switch (input.below(8)) {
      case 0:
        if (flows < max_flows && ringfold_agent_core_add(&core, &flow, now) >= 0) ++flows;
        break;
      case 1:
        if (ringfold_agent_core_remove(&core, id, now) == 0) --flows;
        break;
      case 2:
        if (core.state == RINGFOLD_AGENT_AWAY) ringfold_agent_core_connected(&core, now);
        break;
      case 3:
        ringfold_agent_core_renew(&core, id, now);
        ringfold_agent_core_report(&core, id, rates, nullptr, nullptr);
        break;
      case 4:
        now += input.number<std::uint32_t>({1'000'000, 1'000'000'000, 4'000'000'000});
        ringfold_agent_core_tick(&core, now);
        break;
      case 5:
        split(input);
        break;
      default: {
        if (core.state == RINGFOLD_AGENT_AWAY) break;
        const Bytes bytes = response(input, core);
        const std::size_t cut = input.below(bytes.size() + 1);
        if (ringfold_agent_core_receive(&core, bytes.data(), cut, now) != 0 ||
            ringfold_agent_core_receive(&core, bytes.data() + cut, bytes.size() - cut, now) != 0) {
          ringfold_agent_core_disconnected(&core);
        }
      }
    }
    if (core.is_broken) ringfold_agent_core_disconnected(&core);
    check(core);
    std::size_t alive = 0;
    for (std::uint32_t each = 0; each < core.count; ++each) alive += core.entries[each].state != RINGFOLD_FLOW_NONE;
    REQUIRE(alive == flows, "%zu flows instead of %zu", alive, flows);
  }
  ringfold_agent_core_free(&core);
  return 0;
}
