#include "ringfold/plan.hpp"

#include <algorithm>

namespace ringfold {
namespace {

constexpr std::size_t chunk_grain = 64;  // no element is ever cut: item sizes divide it
constexpr std::size_t smallest_segment = 32 * 1024;
// Beyond, a ring costs less: its segments are longer, and it has fewer lanes to look after.
constexpr std::size_t largest_mesh = std::size_t{4} << 20, largest_mesh_here = std::size_t{128} << 10;
constexpr std::size_t largest_square = std::size_t{2} << 20;  // beyond, the ring keeps both directions busier

std::vector<Range> equal_chunks(std::size_t bytes, std::uint32_t count) {
  std::vector<Range> chunks(count);
  for (std::uint32_t i = 0; i < count; ++i) chunks[i] = {bytes / count * i, bytes / count * (i + 1)};
  return chunks;
}

std::vector<Range> grained_chunks(std::size_t bytes, std::uint32_t count) {
  const std::size_t grains = (bytes + chunk_grain - 1) / chunk_grain;
  const auto cut = [&](std::uint32_t i) { return std::min(grains * i / count * chunk_grain, bytes); };
  std::vector<Range> chunks(count);
  for (std::uint32_t i = 0; i < count; ++i) chunks[i] = {cut(i), cut(i + 1)};
  return chunks;
}

// A chunk of one segment does not overlap receiving with sending: cut it in two, down to what a frame is worth. Whole
// grains, whatever is asked for: no element is cut.
std::size_t fitting_segment(std::size_t largest_chunk, std::size_t wanted) {
  const std::size_t segment_bytes = std::max(wanted / chunk_grain, std::size_t{1}) * chunk_grain;
  const std::size_t half = (largest_chunk / 2 + chunk_grain - 1) / chunk_grain * chunk_grain;
  return std::min(segment_bytes, std::max(half, std::min(smallest_segment, segment_bytes)));
}

std::size_t largest(const std::vector<Range>& chunks) {
  std::size_t most = 0;
  for (const Range& chunk : chunks) most = std::max(most, chunk.bytes());
  return most;
}

// What the slice has of a chunk that is cut at multiples of `grain`.
Range sliced(const Range& chunk, Slice slice, std::size_t grain) {
  const std::size_t grains = (chunk.bytes() + grain - 1) / grain;
  const auto cut = [&](std::uint32_t i) { return std::min(chunk.begin + grains * i / slice.of * grain, chunk.end); };
  return {cut(slice.number), cut(slice.number + 1)};
}

std::uint32_t modulo(std::int64_t value, std::uint32_t size) {
  const std::int64_t n = size;
  return static_cast<std::uint32_t>(((value % n) + n) % n);
}

void pass(Receive& receive, std::uint32_t stage, Side to = next_side) {
  receive.passes[receive.pass_count++] = {static_cast<std::uint16_t>(stage), to};
}

// `hops` stages in which chunks wander to the next rank, each passed on until the last of them.
class RingStages {
 public:
  RingStages(Plan& plan, std::uint32_t stages) : plan_(plan), stages_(stages) {}

  void receive(std::int64_t chunk, bool reduce, bool first_touch, bool last_reduce) {
    Receive stage;
    stage.chunk = static_cast<std::int32_t>(modulo(chunk, plan_.size));
    stage.reduce = reduce;
    stage.first_touch = first_touch;
    stage.last_reduce = last_reduce;
    const auto next = static_cast<std::uint32_t>(plan_.receives.size()) + 1;
    if (next < stages_) pass(stage, next);
    plan_.receives.push_back(stage);
  }

 private:
  Plan& plan_;
  std::uint32_t stages_;
};

void plan_exchange(Plan& plan, std::size_t bytes) {
  plan.chunks = {{0, bytes}};
  plan.origins.push_back({0, {}});
  Receive whole;
  whole.chunk = 0;
  whole.reduce = whole.first_touch = whole.last_reduce = true;
  plan.receives.push_back(whole);
  plan.exchange = true;
}

// Ring positions 0 1 2 3 are the corners 00 10 11 01 of a square: one neighbour differs in the first bit (the partner
// across), the other in the second (the partner along). Chunk q(a, b) belongs to corner ab.
void plan_square(Plan& plan, std::size_t bytes) {
  plan.chunks = grained_chunks(bytes, 4);
  const bool even = plan.rank % 2 == 0;
  const int a = plan.rank == 1 || plan.rank == 2, b = plan.rank >= 2;
  const auto q = [](int first, int second) { return first * 2 + second; };
  const Side across = even ? next_side : previous_side, along = even ? previous_side : next_side;
  plan.origins = {{q(!a, !b), {0, across}}, {q(!a, b), {1, across}}};
  plan.receives.resize(6);
  const auto receive = [&](int stage, int chunk, Side from, bool reduce, bool first_touch) -> Receive& {
    Receive& out = plan.receives[static_cast<std::size_t>(stage)];
    out.chunk = chunk;
    out.from = from;
    out.reduce = reduce;
    out.first_touch = first_touch;
    return out;
  };
  pass(receive(0, q(a, !b), across, true, true), 2, along);
  receive(1, q(a, b), across, true, true);
  Receive& owned = receive(2, q(a, b), along, true, false);
  owned.after = 1;
  owned.last_reduce = true;
  pass(owned, 3, along);
  pass(owned, 4, across);
  pass(receive(3, q(a, !b), along, false, false), 5, across);
  receive(4, q(!a, b), across, false, true);
  receive(5, q(!a, !b), across, false, true);
}

void plan_ring(Plan& plan, std::size_t bytes, bool quantised) {
  const std::uint32_t hops = plan.size - 1;
  const std::int64_t r = plan.rank;
  plan.chunks = grained_chunks(bytes, plan.size);
  plan.origins.push_back({static_cast<std::int32_t>(plan.rank), {}});
  RingStages stages(plan, 2 * hops);
  for (std::uint32_t s = 0; s < hops; ++s) {
    const bool last = s + 1 == hops;
    stages.receive(r - s - 1, true, last || !quantised, last);
  }
  for (std::uint32_t t = 0; t < hops; ++t) stages.receive(r - t, false, t == 0 || quantised, false);
}

// Stage d is what comes from the rank d + 1 further on: first their values of this rank's chunk, then their results.
void plan_mesh(Plan& plan, std::size_t bytes) {
  const std::uint32_t n = plan.size, r = plan.rank, others = n - 1;
  plan.chunks = grained_chunks(bytes, n);
  plan.receives.resize(std::size_t{2} * others);
  for (std::uint32_t d = 0; d < others; ++d) {
    const std::uint32_t from = (r + d + 1) % n;
    const Side side = side_towards(r, n, from);
    const auto stage = static_cast<std::uint16_t>(n - d - 2);  // what this rank is to that one
    Receive& value = plan.receives[d];
    value = {.chunk = static_cast<std::int32_t>(r), .reduce = true, .first_touch = d == 0, .from = side};
    value.after = static_cast<std::int32_t>(d) - 1;
    value.last_reduce = value.to_all = d + 1 == others;
    plan.receives[others + d] = {.chunk = static_cast<std::int32_t>(from), .first_touch = true, .from = side};
    plan.origins.push_back({static_cast<std::int32_t>(from), {stage, side}});
    plan.to_all.push_back({static_cast<std::uint16_t>(others + stage), side});
  }
}

// Rank h m + i is member i of host h. The chunks of part p are p H to p H + H - 1: one for each host, because the ring
// across hosts cuts a part once more. Each has stages of its own, so that a chunk goes on as soon as it is there.
void plan_hosts(Plan& plan, std::size_t bytes, std::uint32_t hosts) {
  const std::uint32_t members = plan.size / hosts, h = plan.rank / members, i = plan.rank % members;
  const auto side = [&](std::uint32_t host, std::uint32_t member) {
    return side_towards(plan.rank, plan.size, host % hosts * members + member % members);
  };
  const Side here_next = side(h, i + 1), here_previous = side(h, i + members - 1);
  const Side there_next = side(h + 1, i), there_previous = side(h + hosts - 1, i);
  const std::uint32_t across = (members - 1) * hosts;               // the first stage between hosts
  const std::uint32_t gathering = across + 2 * (hosts - 1);         // and the first one of the end, inside each host
  const std::uint32_t mine = modulo(std::int64_t{i} + 1, members);  // the part that this rank reduces across hosts
  const auto chunk = [&](std::int64_t part, std::int64_t of_host) {
    return static_cast<std::int32_t>(modulo(part, members) * hosts + modulo(of_host, hosts));
  };
  plan.chunks = grained_chunks(bytes, plan.size);
  plan.receives.resize(gathering + (members - 1) * hosts);
  for (std::uint32_t k = 0; k < hosts; ++k) {
    plan.origins.push_back({chunk(i, k), {static_cast<std::uint16_t>(k), here_next}});
  }
  for (std::uint32_t s = 0; s + 1 < members; ++s) {
    for (std::uint32_t k = 0; k < hosts; ++k) {
      Receive& in = plan.receives[s * hosts + k];
      in = {.chunk = chunk(std::int64_t{i} - s - 1, k), .reduce = true, .first_touch = true, .from = here_previous};
      if (s + 2 < members) pass(in, (s + 1) * hosts + k, here_next);
      else if (k == h) pass(in, across, there_next);
    }
  }
  for (std::uint32_t u = 0; u < 2 * (hosts - 1); ++u) {
    const bool reduces = u + 1 < hosts, last = u + 2 == hosts;
    const std::int64_t k = reduces ? std::int64_t{h} - u - 1 : std::int64_t{h} - (u - (hosts - 1));
    Receive& in = plan.receives[across + u];
    in = {.chunk = chunk(mine, k), .reduce = reduces, .last_reduce = last, .from = there_previous};
    if (reduces) in.after = static_cast<std::int32_t>((members - 2) * hosts + modulo(k, hosts));
    if (u + 1 < 2 * (hosts - 1)) pass(in, across + u + 1, there_next);
    if (!reduces || last) pass(in, gathering + modulo(k, hosts), here_next);
  }
  for (std::uint32_t t = 0; t + 1 < members; ++t) {
    for (std::uint32_t k = 0; k < hosts; ++k) {
      Receive& in = plan.receives[gathering + t * hosts + k];
      in = {.chunk = chunk(std::int64_t{i} - t, k), .first_touch = t == 0, .from = here_previous};
      if (t + 2 < members) pass(in, gathering + (t + 1) * hosts + k, here_next);
    }
  }
}

void plan_reduce_scatter(Plan& plan, std::size_t bytes) {
  const std::uint32_t hops = plan.size - 1;
  const std::int64_t r = plan.rank;
  plan.chunks = equal_chunks(bytes, plan.size);
  plan.origins.push_back({static_cast<std::int32_t>(modulo(r - 1, plan.size)), {}});
  RingStages stages(plan, hops);
  for (std::uint32_t s = 0; s < hops; ++s) stages.receive(r - s - 2, true, true, s + 1 == hops);
}

void plan_all_gather(Plan& plan, std::size_t bytes) {
  const std::uint32_t hops = plan.size - 1;
  const std::int64_t r = plan.rank;
  plan.chunks = equal_chunks(bytes, plan.size);
  plan.origins.push_back({static_cast<std::int32_t>(plan.rank), {}});
  RingStages stages(plan, hops);
  for (std::uint32_t t = 0; t < hops; ++t) stages.receive(r - t - 1, false, true, false);
}

void plan_broadcast(Plan& plan, std::size_t bytes, std::uint32_t root) {
  const std::uint32_t hops = plan.size - 1;
  plan.chunks = {{0, bytes}};
  const std::uint32_t distance = modulo(std::int64_t{plan.rank} - root, plan.size);
  plan.receives.resize(hops);
  if (distance == 0) {
    plan.origins.push_back({0, {}});
    return;
  }
  Receive& whole = plan.receives[distance - 1];
  whole.chunk = 0;
  whole.first_touch = true;
  if (distance < hops) pass(whole, distance);
}

}  // namespace

bool takes_mesh(std::size_t bytes, std::uint32_t size, bool quantised, Topology topology) {
  if (!topology.mesh || topology.hosts > 1 || quantised) return false;
  return topology.one_host ? size > 4 && bytes <= largest_mesh_here : size > 3 && bytes <= largest_mesh;
}

Side side_towards(std::uint32_t rank, std::uint32_t size, std::uint32_t other) {
  const std::uint32_t previous = (rank + size - 1) % size, next = (rank + 1) % size;
  if (other == next) return next_side;
  if (other == previous) return previous_side;
  Side side = first_direct_side;
  for (std::uint32_t each = 0; each < other; ++each) side += each != rank && each != previous && each != next;
  return side;
}

Plan make_plan(OpKind kind, std::size_t bytes, std::uint32_t rank, std::uint32_t size, std::uint32_t root,
               std::size_t segment_bytes, bool quantised, Slice slice, Topology topology) {
  Plan plan;
  plan.rank = rank;
  plan.size = size;
  switch (kind) {
    case OpKind::all_reduce:
      if (topology.hosts > 1 && !quantised) plan_hosts(plan, bytes, topology.hosts);
      else if (takes_mesh(bytes, size, quantised, topology)) plan_mesh(plan, bytes);
      else if (size == 2 && !quantised) plan_exchange(plan, bytes);
      else if (size == 4 && bytes <= largest_square && !quantised) plan_square(plan, bytes);
      else plan_ring(plan, bytes, quantised);
      break;
    case OpKind::reduce_scatter:
      plan_reduce_scatter(plan, bytes);
      break;
    case OpKind::all_gather:
      plan_all_gather(plan, bytes);
      break;
    case OpKind::broadcast:
      plan_broadcast(plan, bytes, root);
      break;
    case OpKind::barrier:
      break;
  }
  if (quantised) plan.segment_bytes = fitting_segment(largest(plan.chunks), segment_bytes);
  if (slice.of > 1) {
    for (Range& chunk : plan.chunks) chunk = sliced(chunk, slice, quantised ? plan.segment_bytes : chunk_grain);
  }
  if (!quantised) plan.segment_bytes = fitting_segment(largest(plan.chunks), segment_bytes);
  const auto use = [&plan](Side side) {
    plan.bytes_from.resize(std::max<std::size_t>(plan.bytes_from.size(), side + 1));
  };
  for (const Origin& origin : plan.origins) use(origin.send.to);
  for (Receive& stage : plan.receives) {
    if (stage.chunk < 0) continue;
    use(stage.from);
    for (std::uint8_t i = 0; i < stage.pass_count; ++i) use(stage.passes[i].to);
    stage.first_bit = plan.receive_segments;
    plan.receive_segments += static_cast<std::uint32_t>(plan.segments(stage.chunk));
    plan.bytes_from[stage.from] += plan.chunk(stage.chunk).bytes();
  }
  return plan;
}

}  // namespace ringfold
