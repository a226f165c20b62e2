#include "ringfold/plan.hpp"

#include <algorithm>

namespace ringfold {
namespace {

constexpr std::size_t chunk_grain = 64;    // no element is ever cut: item sizes divide it
constexpr std::size_t smallest_segment = 32 * 1024;

std::vector<std::size_t> equal_chunks(std::size_t bytes, std::uint32_t count) {
  std::vector<std::size_t> begin(count + 1);
  for (std::uint32_t i = 0; i <= count; ++i) begin[i] = bytes / count * i;
  return begin;
}

std::vector<std::size_t> grained_chunks(std::size_t bytes, std::uint32_t count) {
  const std::size_t grains = (bytes + chunk_grain - 1) / chunk_grain;
  std::vector<std::size_t> begin(count + 1);
  for (std::uint32_t i = 0; i <= count; ++i) begin[i] = std::min(grains * i / count * chunk_grain, bytes);
  return begin;
}

// A chunk of one segment does not overlap receiving with sending: cut it in two, down to what a frame is worth.
std::size_t fitting_segment(std::size_t largest_chunk, std::size_t segment_bytes) {
  const std::size_t half = (largest_chunk / 2 + chunk_grain - 1) / chunk_grain * chunk_grain;
  return std::min(segment_bytes, std::max(half, std::min(smallest_segment, segment_bytes)));
}

std::uint32_t modulo(std::int64_t value, std::uint32_t size) {
  const std::int64_t n = size;
  return static_cast<std::uint32_t>(((value % n) + n) % n);
}

}  // namespace

Plan make_plan(OpKind kind, std::size_t bytes, std::uint32_t rank, std::uint32_t size, std::uint32_t root,
               std::size_t segment_bytes) {
  Plan plan;
  plan.rank = rank;
  plan.size = size;
  const std::int64_t r = rank;
  const std::uint32_t hops = size - 1;
  const auto receive = [&](std::int64_t chunk, bool reduce, bool first_touch, bool last_reduce) {
    plan.receives.push_back({static_cast<std::int32_t>(modulo(chunk, size)), reduce, first_touch, last_reduce, 0});
  };
  switch (kind) {
    case OpKind::all_reduce:
      if (size == 2) {
        plan.chunk_begin = {0, bytes};
        plan.first_chunk = 0;
        plan.receives.push_back({0, true, true, true, 0});
        plan.stages = 1;
        plan.exchange = true;
        break;
      }
      plan.chunk_begin = grained_chunks(bytes, size);
      plan.first_chunk = static_cast<std::int32_t>(rank);
      for (std::uint32_t s = 0; s < hops; ++s) receive(r - s - 1, true, true, s + 1 == hops);
      for (std::uint32_t t = 0; t < hops; ++t) receive(r - t, false, t == 0, false);
      plan.stages = 2 * hops;
      break;
    case OpKind::reduce_scatter:
      plan.chunk_begin = equal_chunks(bytes, size);
      plan.first_chunk = static_cast<std::int32_t>(modulo(r - 1, size));
      for (std::uint32_t s = 0; s < hops; ++s) receive(r - s - 2, true, true, s + 1 == hops);
      plan.stages = hops;
      break;
    case OpKind::all_gather:
      plan.chunk_begin = equal_chunks(bytes, size);
      plan.first_chunk = static_cast<std::int32_t>(rank);
      for (std::uint32_t t = 0; t < hops; ++t) receive(r - t - 1, false, true, false);
      plan.stages = hops;
      break;
    case OpKind::broadcast: {
      plan.chunk_begin = {0, bytes};
      const std::uint32_t distance = modulo(r - root, size);
      if (distance == 0) plan.first_chunk = 0;
      plan.receives.resize(hops);
      if (distance > 0) plan.receives[distance - 1] = {0, false, true, false, 0};
      plan.stages = hops;
      break;
    }
    case OpKind::barrier:
      plan.chunk_begin = {0};
      break;
  }
  std::size_t largest = 0;
  for (std::size_t i = 0; i + 1 < plan.chunk_begin.size(); ++i) {
    largest = std::max(largest, plan.chunk_begin[i + 1] - plan.chunk_begin[i]);
  }
  plan.segment_bytes = fitting_segment(largest, segment_bytes);
  for (Receive& stage : plan.receives) {
    if (stage.chunk < 0) continue;
    stage.first_bit = plan.receive_segments;
    plan.receive_segments += static_cast<std::uint32_t>(plan.segments(stage.chunk));
    plan.receive_bytes += plan.chunk_bytes(stage.chunk);
  }
  return plan;
}

}  // namespace ringfold
