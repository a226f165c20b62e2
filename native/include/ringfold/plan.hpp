// The schedule of one op on the ring, seen from one rank.
//
// Words: the op's buffer is one range of bytes, cut into chunks; a chunk travels as segments. A *stage* names one hop
// of one chunk; sender and receiver know it by the same number. What is received at a stage either is reduced (target =
// source op incoming) or overwrites the target, and may then be passed on at later stages. Lanes carry payload both
// ways, so a rank sends to the next and to the previous member.
//
// all_reduce, n ranks, B bytes: every rank sends and receives 2(n-1)/n B.
//   n = 2: the ranks exchange the whole buffer in one stage. Both reduce all of it, in rank order, so both compute the
//     same bits.
//   n = 4, up to 2 MiB: a ring of four is a square. Each rank exchanges halves with one neighbour, then quarters with
//     the other, then the same in reverse order: 4 exchanges in a row instead of 6.
//   otherwise, and always when quantised: at stage s < n-1 rank r receives and reduces chunk r-s-1. It ends up owning
//     chunk r+1, which then circulates unchanged for n-1 stages.
//   a mesh, where every rank has lanes to all others, up to 4 MiB between hosts, 128 KiB on one: rank r receives chunk
//   r
//     from each of the others and reduces it, in the order of ranks from r on, and sends the result to all: 2 hops
//     instead of 2(n-1). On one host a hop costs little, and so do the few exchanges of a square.
//   several hosts of m members each, unquantised: the members of a host reduce a part each among themselves, in a ring
//   of
//     their own; member i then reduces its part with the members i of the other hosts, in a ring across hosts; then the
//     parts go around inside each host. A rank sends and receives as many bytes as in one ring, but a host of H sends
//     only 2(H-1)/H B to others, instead of 2(n-1)/n B, and m streams share them.
// In each of them one rank computes the final value of a byte (or both compute it from the same operands in the same
// order), so all hold the same bits. reduce_scatter is the first half of the ring, shifted so that rank r owns chunk r;
// all_gather is the second half; broadcast is a chain from the root with one chunk and n-1 hops.
//
// A quantised all_reduce writes a chunk to the target only once, when its final value is there: what is reduced before
// goes straight into the segment for the next hop. So only the last reduce and the circulating chunks touch memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringfold {

// The members that a rank has a link to, seen from it: the two neighbours in the ring, then others by rank
// (EpochState).
using Side = std::uint32_t;
inline constexpr Side previous_side = 0, next_side = 1, first_direct_side = 2;
inline constexpr Side no_side = ~Side{0};

enum class OpKind : std::uint8_t { all_reduce = 0, broadcast = 1, all_gather = 2, reduce_scatter = 3, barrier = 4 };

struct Send {
  std::uint16_t stage = 0;
  Side to = next_side;
};

struct Receive {
  std::int32_t chunk = -1;  // -1: nothing arrives at this stage
  bool reduce = false;
  bool first_touch = false;  // the range has not been written by an earlier stage: its old bytes must be saved
  bool last_reduce = false;  // this rank becomes the owner of the final value
  Side from = previous_side;
  std::int32_t after = -1;  // the stage whose value this one is reduced into: an earlier arrival waits for it
  std::uint8_t pass_count = 0;
  std::array<Send, 2> passes{};
  bool to_all = false;  // it is passed on to every other rank: Plan::to_all
  std::uint32_t first_bit = 0;

  bool passes_on() const { return pass_count > 0 || to_all; }
};

// What a rank sends without having received anything.
struct Origin {
  std::int32_t chunk = 0;
  Send send;
};

struct Range {
  std::size_t begin = 0, end = 0;

  std::size_t bytes() const { return end - begin; }
  bool has(std::size_t at) const { return at >= begin && at < end; }
};

// What a plan can use besides the ring.
struct Topology {
  std::uint32_t hosts = 1;  // that the members are on, the same number on each
  bool mesh = false;        // lanes between all members
  bool one_host = false;    // all members are on one
};

// The `number`-th of `of` slices of every chunk.
struct Slice {
  std::uint32_t number = 0, of = 1;
};

struct Plan {
  std::uint32_t rank = 0;
  std::uint32_t size = 1;
  std::size_t segment_bytes = 1;
  std::vector<Range> chunks;      // of each, this plan's slice
  std::vector<Receive> receives;  // by stage
  std::vector<Origin> origins;
  std::vector<Send> to_all;
  bool exchange = false;  // what is sent and what is received are the same range
  std::uint32_t receive_segments = 0;
  std::vector<std::size_t> bytes_from = {0, 0};  // by side, as many as the plan uses

  const Range& chunk(std::int32_t number) const { return chunks[static_cast<std::size_t>(number)]; }
  std::size_t segments(std::int32_t number) const {
    return (chunk(number).bytes() + segment_bytes - 1) / segment_bytes;
  }
};

// Where another rank of the ring is, seen from `rank`.
Side side_towards(std::uint32_t rank, std::uint32_t size, std::uint32_t other);

// `bytes` is the whole range: the input of an all_reduce, reduce_scatter or broadcast, the output of an all_gather.
// Chunks of an all_gather or reduce_scatter are equal; those of an all_reduce are cut at multiples of 64 bytes.
//
// A channel carries one slice of every chunk, the others carry theirs: the order of operands is the same for any number
// of slices. Slices are cut at multiples of 64 bytes, so that no cache line has two writers. The blocks of a quantised
// op depend on where its segments begin: its slices are whole segments of the whole chunk.
Plan make_plan(OpKind kind, std::size_t bytes, std::uint32_t rank, std::uint32_t size, std::uint32_t root,
               std::size_t segment_bytes, bool quantised = false, Slice slice = {}, Topology topology = {});

// Whether an all_reduce of so many bytes goes through the mesh of a topology.
bool takes_mesh(std::size_t bytes, std::uint32_t size, bool quantised, Topology topology);

}  // namespace ringfold
