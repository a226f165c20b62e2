// Who sends what when: the ring schedule of one op, seen from one rank.
//
// Words: the op's buffer is one range of bytes, cut into chunks; a chunk travels as segments. A *stage* is one hop of a
// chunk: what rank r receives at stage s it passes on at stage s + 1, if the schedule goes on. A receive either reduces
// (target = source op incoming) or overwrites (target = incoming).
//
// all_reduce, n ranks, B bytes: 2(n-1) stages, each rank sends and receives 2(n-1)/n B. At stage s < n-1 rank r receives
// and reduces chunk r-s-1; rank r ends up owning chunk r+1, which then circulates unchanged for n-1 stages, so every
// rank holds the owner's bits. reduce_scatter is the first half, shifted so that rank r owns chunk r; all_gather is the
// second half; broadcast is a chain from the root with one chunk and n-1 hops. Two ranks exchange the whole buffer in one
// stage and both reduce all of it: the same bytes, half the stages; in rank order, so that both compute the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringfold {

enum class OpKind : std::uint8_t { all_reduce = 0, broadcast = 1, all_gather = 2, reduce_scatter = 3, barrier = 4 };

struct Receive {
  std::int32_t chunk = -1;   // -1: nothing arrives at this stage
  bool reduce = false;
  bool first_touch = false;  // the range has not been written by an earlier stage: its old bytes must be saved
  bool last_reduce = false;  // this rank becomes the owner of the final value
  std::uint32_t first_bit = 0;
};

struct Plan {
  std::uint32_t rank = 0;
  std::uint32_t size = 1;
  std::size_t segment_bytes = 1;
  std::vector<std::size_t> chunk_begin;  // one more than there are chunks
  std::vector<Receive> receives;         // by stage
  std::int32_t first_chunk = -1;         // what this rank sends at stage 0 without having received anything
  std::uint32_t stages = 0;              // received at s is passed on at s + 1 iff s + 1 < stages
  bool exchange = false;                 // what is sent and what is received are the same range
  std::uint32_t receive_segments = 0;
  std::size_t receive_bytes = 0;

  std::size_t chunk_bytes(std::int32_t chunk) const { return chunk_begin[chunk + 1] - chunk_begin[chunk]; }
  std::size_t segments(std::int32_t chunk) const {
    return (chunk_bytes(chunk) + segment_bytes - 1) / segment_bytes;
  }
};

// `bytes` is the whole range: the input of an all_reduce, reduce_scatter or broadcast, the output of an all_gather.
// Chunks of an all_gather or reduce_scatter are equal; those of an all_reduce are cut at multiples of 64 bytes.
Plan make_plan(OpKind kind, std::size_t bytes, std::uint32_t rank, std::uint32_t size, std::uint32_t root,
               std::size_t segment_bytes);

}  // namespace ringfold
