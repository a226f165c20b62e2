// A bulk connection: blocks of shared state, filler to measure a link with, and messages between them.
//
// A block's body is read straight into its memory: while a block is being received, that memory is what the connection
// offers to be read into. So the receiver declares beforehand which blocks come, in their order (expect), and anything
// else is a protocol violation. Sending copies nothing either: a frame borrows the caller's memory, and `keep` keeps it
// alive. The memory is read or written until the blocks are through, or the connection is closed or lost, and never
// after that.
//
// Invariants:
// - Inside a block or a filler frame, nothing is left in the receive buffer: whatever was read ahead has been moved to
//   where it belongs.
// - A connection that is closed or lost reads and writes no memory of the caller's from then on.
// - Filler that has not begun is at the end of the queue: everything else that is queued goes before it.
//
// A sample measures the link, not the scheduling of this process. So it reports the last moment at which the count was
// complete: something had come, and nothing was left to read. A process that slept and finds a full buffer gives no
// sample half-way through it, and a burst counts from when it came, not from when it was read. Only where the reader
// never catches up, the count as it is has to do: there the reader is the bottleneck. The clock starts with the first
// filler that comes, and only what comes later is counted.
//
// It belongs to the core: see there who may touch it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ringfold/event.hpp"
#include "ringfold/message_connection.hpp"

namespace ringfold {

// One block of shared state: memory of the caller's, and the hash that its content should have.
struct Block {
  std::byte* at = nullptr;
  std::size_t bytes = 0;
  std::optional<std::uint64_t> hash{};
};

// The indices of the blocks whose present content does not have its expected hash.
std::vector<std::uint32_t> differing(const std::vector<Block>& blocks);

class BulkChannel {
 public:
  BulkChannel(MessageConnection& conn, EventQueue& events) : conn_(conn), events_(events) {}

  // std::invalid_argument for blocks that cannot be sent. False, with a reason: the other side requests blocks and does
  // not read them.
  bool send_blocks(const std::vector<Block>& blocks, const MemoryOwner& keep, std::string& why);
  void expect(std::uint64_t batch, std::vector<Block> blocks, MemoryOwner keep);
  // True when it begins.
  bool fill(bool on);
  void sample(Ns now, Ns every);

  std::span<std::byte> receive_space();
  // Bytes that were read. `was_all`: nothing was left to read.
  bool received(Ns now, std::size_t bytes, bool was_all, std::string& why);
  // What was read before the connection became a bulk connection.
  bool process(Ns now, std::string& why);
  // A sample, if it is time.
  void take_sample(Ns now);

  // Queues filler, if it is wanted.
  void pull();
  void frame_is_through(const MessageFrame& frame);
  // The connection is about to be closed: only messages are worth sending.
  void close();

 private:
  struct Batch {
    std::uint64_t number;
    std::vector<Block> blocks;
    MemoryOwner keep;
    std::size_t next = 0;
    std::vector<std::uint32_t> bad{};
  };

  const Block& expected() const { return batches_.front().blocks[batches_.front().next]; }
  bool step(Ns now, std::string& why);
  bool head(std::string& why);
  bool take_message(const std::byte* at, std::size_t bytes);
  bool begin_block(std::size_t bytes, std::string& why);
  void block_is_in();
  void count_filler(Ns now, std::size_t bytes);
  void count_is_whole(Ns now);

  MessageConnection& conn_;
  EventQueue& events_;
  std::deque<Batch> batches_;      // expected, in this order
  bool in_block_ = false;          // the head of the next block's frame has been read
  std::size_t filled_ = 0;         // bytes of that block that are in its memory
  std::size_t filler_left_ = 0;    // of the filler frame at hand
  std::size_t queued_blocks_ = 0;  // bytes of blocks in the queue
  bool fill_ = false;
  bool filler_seen_ = false;
  Ns filler_since_ = 0;
  std::uint64_t filler_bytes_ = 0;  // read
  std::uint64_t counted_ = 0;       // `filler_bytes_` when nothing was left to read, and when that was
  Ns counted_at_ = 0;
  bool is_recounted_ = false;  // since the last sample
  Ns sample_every_ = 0, next_sample_ = 0, behind_since_ = 0;
};

}  // namespace ringfold
