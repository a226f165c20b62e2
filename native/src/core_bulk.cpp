// Bulk connections: blocks of shared state, filler to measure a link with, and messages between them.
//
// A frame is `u32 length | u8 kind | body`. A block's body is read straight into its memory: while a block is being
// received, that memory is what the connection offers to be read into. So the receiver declares beforehand which blocks
// come, in their order (expect_blocks), and anything else is a protocol violation. Sending copies nothing either: a
// frame borrows the caller's memory, and `keep` keeps it alive.
//
// Invariants:
// - Inside a block or a filler frame, nothing is left in `rx`: whatever was read ahead has been moved to where it
//   belongs.
// - A connection that is closed or lost reads and writes no memory of the caller's from then on.
// - Filler that has not begun is at the end of `tx`: everything else that is queued goes before it.
//
// A sample measures the link, not the scheduling of this process. So it reports the last moment at which the count was
// complete: something had come, and nothing was left to read. A process that slept and finds a full buffer gives no
// sample half-way through it, and a burst counts from when it came, not from when it was read. Only where the reader
// never catches up, the count as it is has to do: there the reader is the bottleneck. The clock starts with the first
// filler that comes, and only what comes later is counted.
#include <algorithm>
#include <array>
#include <stdexcept>

#include "ringfold/core.hpp"
#include "ringfold/hash.hpp"

namespace ringfold {
namespace {

constexpr std::size_t filler_frame_bytes = 64 * 1024;
constexpr std::size_t filler_ahead_bytes = 4 * filler_frame_bytes;
constexpr std::size_t filler_read_bytes = 256 * 1024;
constexpr std::size_t read_ahead_bytes = 64 * 1024;  // of messages and of blocks that are smaller than this
constexpr std::size_t max_queued_blocks = std::size_t{64} << 20;

Payload head_of(ControlFrame kind, std::size_t bytes) {
  Bytes head;
  head.reserve(control_head_bytes);
  put(head, static_cast<std::uint32_t>(bytes + 1));
  put(head, kind);
  return head;
}

// Bytes that no link can compress.
std::span<const std::byte> filler_bytes() {
  static const auto buffer = [] {
    std::array<std::byte, filler_frame_bytes> out;
    std::uint64_t state = 0x9e3779b97f4a7c15ull;
    for (std::byte& each : out) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      each = static_cast<std::byte>(state >> 56);
    }
    return out;
  }();
  return buffer;
}

void check_sizes(const std::vector<Block>& blocks) {
  if (blocks.empty()) throw std::invalid_argument("no blocks");
  for (const Block& block : blocks) {
    if (block.bytes == 0) throw std::invalid_argument("a block of no bytes");
    if (block.bytes >= max_bulk_bytes) {
      throw std::invalid_argument("a block of " + std::to_string(block.bytes) + " bytes");
    }
  }
}

}  // namespace

std::vector<std::uint32_t> differing(const std::vector<Block>& blocks) {
  std::vector<std::uint32_t> out;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const Block& block = blocks[i];
    if (block.hash && hash_block(block.at, block.bytes) != *block.hash) out.push_back(static_cast<std::uint32_t>(i));
  }
  return out;
}

// Commands.

Core::Conn* Core::find_bulk(ConnId id) {
  Conn* conn = find_conn(id);
  if (conn == nullptr || conn->closing) return nullptr;
  if (conn->role != Role::bulk) throw std::invalid_argument("not a bulk connection: make_bulk() comes first");
  return conn;
}

void Core::make_bulk(Ns now, ConnId id) {
  Conn* conn = find_conn(id);
  if (conn == nullptr || conn->closing) return;
  if (conn->role != Role::handshake)
    throw std::invalid_argument("only a connection in its handshake becomes a bulk connection");
  conn->role = Role::bulk;
  conn->held = false;
  process(now, *conn);
}

bool Core::is_bulk(ConnId id) const {
  const Conn* conn = find_conn(id);
  return conn != nullptr && conn->role == Role::bulk;
}

void Core::send_blocks(Ns now, ConnId id, const std::vector<Block>& blocks, const MemoryOwner& keep) {
  check_sizes(blocks);
  Conn* conn = find_bulk(id);
  if (conn == nullptr) return;
  std::size_t bytes = 0;
  for (const Block& block : blocks) bytes += block.bytes;
  // The other side chooses what it requests, so this is its fault and not the caller's.
  if (conn->bulk.queued_blocks + bytes > max_queued_blocks) {
    violation(now, *conn,
              "it asks for blocks and does not read them: more than " + std::to_string(max_queued_blocks >> 20) +
                  " MiB would wait");
    return;
  }
  conn->bulk.queued_blocks += bytes;
  for (const Block& block : blocks) {
    OutFrame frame;
    frame.owned = head_of(ControlFrame::block, block.bytes);
    frame.borrowed = {block.at, block.bytes};
    frame.keep = keep;
    frame.total = control_head_bytes + block.bytes;
    queue(*conn, std::move(frame));
  }
}

void Core::expect_blocks(ConnId id, std::uint64_t batch, std::vector<Block> blocks, MemoryOwner keep) {
  check_sizes(blocks);
  Conn* conn = find_bulk(id);
  if (conn != nullptr) conn->bulk.batches.push_back({batch, std::move(blocks), std::move(keep)});
}

void Core::fill(ConnId id, bool on) {
  Conn* conn = find_bulk(id);
  if (conn == nullptr || conn->bulk.fill == on) return;
  conn->bulk.fill = on;
  if (on) {
    filling_.push_back(id);
    mark_dirty(*conn);
  } else {
    drop_filler(*conn);
  }
}

std::vector<ConnId> Core::take_filling() { return std::exchange(filling_, {}); }

void Core::sample(Ns now, ConnId id, Ns every) {
  if (every < 0) throw std::invalid_argument("a sample every " + std::to_string(every) + " ns");
  Conn* conn = find_bulk(id);
  if (conn == nullptr) return;
  conn->bulk.sample_every = every;
  conn->bulk.next_sample = now + every;
}

// Receiving.

std::size_t Core::bulk_read_bytes(const Conn& conn) const {
  const Bulk& bulk = conn.bulk;
  if (bulk.filler_seen) return filler_read_bytes;
  if (bulk.batches.empty()) return read_ahead_bytes;
  const Batch& batch = bulk.batches.front();
  // A head alone, so that none of a large block has to be copied to where it belongs.
  const bool large = batch.blocks[batch.next].bytes >= read_ahead_bytes;
  return large ? control_head_bytes - (conn.rx_end - conn.rx_begin) : read_ahead_bytes;
}

// One step through what has been read; false when it is used up, or the connection is.
bool Core::process_bulk(Ns now, Conn& conn) {
  Bulk& bulk = conn.bulk;
  const std::size_t have = conn.rx_end - conn.rx_begin;
  if (bulk.in_block) {
    const Block& block = bulk.batches.front().blocks[bulk.batches.front().next];
    const std::size_t step = std::min(have, block.bytes - bulk.filled);
    if (step > 0) std::memcpy(block.at + bulk.filled, conn.rx.data() + conn.rx_begin, step);
    conn.rx_begin += step;
    bulk.filled += step;
    if (bulk.filled < block.bytes) return false;
    block_is_in(conn);
    return true;
  }
  if (bulk.filler_left > 0) {
    const std::size_t step = std::min(have, bulk.filler_left);
    conn.rx_begin += step;
    bulk.filler_left -= step;
    count_filler(now, conn, step);
    return step > 0;
  }
  return bulk_head(now, conn);
}

// The head of a frame; a message as a whole.
bool Core::bulk_head(Ns now, Conn& conn) {
  Bulk& bulk = conn.bulk;
  const std::size_t have = conn.rx_end - conn.rx_begin;
  if (have < control_head_bytes) return false;
  const std::byte* at = conn.rx.data() + conn.rx_begin;
  std::uint32_t length = 0;
  std::memcpy(&length, at, sizeof length);
  const auto kind = static_cast<ControlFrame>(at[4]);
  const std::size_t bytes = std::size_t{length} - 1;
  const std::size_t limit = kind == ControlFrame::filler ? max_filler_bytes + 1 : max_bulk_bytes;
  if (length < 1 || length > limit) {
    violation(now, conn, "a frame of " + std::to_string(length) + " bytes (limit " + std::to_string(limit) + ")");
    return false;
  }
  if (kind == ControlFrame::message) {
    if (have < control_head_bytes + bytes) return false;
    Event event{.kind = Event::Kind::message, .conn = conn.id};
    event.body.assign(at + control_head_bytes, at + control_head_bytes + bytes);
    conn.rx_begin += control_head_bytes + bytes;
    push_event(std::move(event));
    return true;
  }
  if (kind == ControlFrame::filler) {
    bulk.filler_left = bytes;
  } else if (kind != ControlFrame::block) {
    violation(now, conn, "unexpected frame kind " + std::to_string(static_cast<int>(kind)));
    return false;
  } else if (bulk.batches.empty()) {
    violation(now, conn, "a block that was not requested");
    return false;
  } else {
    const Batch& batch = bulk.batches.front();
    const std::size_t wanted = batch.blocks[batch.next].bytes;
    if (bytes != wanted) {
      violation(now, conn,
                "a block of " + std::to_string(bytes) + " bytes where " + std::to_string(wanted) + " were requested");
      return false;
    }
    bulk.in_block = true;
    bulk.filled = 0;
  }
  conn.rx_begin += control_head_bytes;
  return true;
}

void Core::block_is_in(Conn& conn) {
  Bulk& bulk = conn.bulk;
  Batch& batch = bulk.batches.front();
  const Block& block = batch.blocks[batch.next];
  if (block.hash && hash_block(block.at, block.bytes) != *block.hash) {
    batch.bad.push_back(static_cast<std::uint32_t>(batch.next));
  }
  bulk.in_block = false;
  bulk.filled = 0;
  if (++batch.next < batch.blocks.size()) return;
  Event event{.kind = Event::Kind::blocks, .conn = conn.id, .batch = batch.number};
  event.bad = std::move(batch.bad);
  bulk.batches.pop_front();
  push_event(std::move(event));
}

void Core::count_filler(Ns now, Conn& conn, std::size_t bytes) {
  Bulk& bulk = conn.bulk;
  if (bytes == 0) return;
  if (!bulk.filler_seen) {
    bulk.filler_seen = true;
    bulk.filler_since = now;
    bulk.next_sample = now + bulk.sample_every;
  }
  if (now > bulk.filler_since) bulk.filler_bytes += bytes;
}

void Core::count_is_whole(Ns now, Bulk& bulk) {
  if (bulk.filler_bytes == bulk.counted) return;
  bulk.counted = bulk.filler_bytes;
  bulk.counted_at = now;
  bulk.is_recounted = true;
}

void Core::take_sample(Ns now, Conn& conn) {
  Bulk& bulk = conn.bulk;
  if (!bulk.filler_seen || bulk.sample_every == 0 || conn.closing || now < bulk.next_sample) return;
  if (!bulk.is_recounted && bulk.filler_bytes > bulk.counted) {
    if (bulk.behind_since == 0) bulk.behind_since = now;
    if (now - bulk.behind_since < bulk.sample_every / 4) return;
    count_is_whole(now, bulk);
  }
  bulk.next_sample = now + bulk.sample_every;
  bulk.is_recounted = false;
  bulk.behind_since = 0;
  push_event({.kind = Event::Kind::sample,
              .conn = conn.id,
              .elapsed = now - bulk.filler_since,
              .counted = bulk.counted == 0 ? 0 : bulk.counted_at - bulk.filler_since,
              .bytes = bulk.counted});
}

// Sending.

void Core::queue(Conn& conn, OutFrame frame) {
  conn.tx_bytes += frame.total;
  auto at = conn.tx.end();
  while (at != conn.tx.begin() && std::prev(at)->filler && std::prev(at)->sent == 0) --at;
  conn.tx.insert(at, std::move(frame));
  mark_dirty(conn);
}

void Core::pull_filler(Conn& conn) {
  static const Payload head = head_of(ControlFrame::filler, filler_frame_bytes);
  while (conn.bulk.fill && !conn.closing && conn.tx_bytes < filler_ahead_bytes) {
    OutFrame frame;
    frame.filler = true;
    frame.owned = head;
    frame.borrowed = filler_bytes();
    frame.total = control_head_bytes + filler_frame_bytes;
    conn.tx_bytes += frame.total;
    conn.tx.push_back(std::move(frame));
  }
}

void Core::drop_filler(Conn& conn) {
  while (!conn.tx.empty() && conn.tx.back().filler && conn.tx.back().sent == 0) {
    conn.tx_bytes -= conn.tx.back().total;
    conn.tx.pop_back();
  }
}

// The connection is about to be closed: only messages are worth sending. The rest of a block that has begun goes along
// if a message follows it, as a copy, because the caller's memory is its own again.
void Core::drop_blocks(Conn& conn) {
  conn.bulk = {};
  std::erase_if(conn.tx, [&](const OutFrame& frame) {
    const bool drop = frame.sent == 0 && !frame.borrowed.empty();
    if (drop) conn.tx_bytes -= frame.total;
    return drop;
  });
  if (conn.tx.empty() || conn.tx.front().borrowed.empty()) return;
  OutFrame& begun = conn.tx.front();
  if (conn.tx.size() == 1) {
    conn.tx_bytes = 0;
    conn.tx.clear();
    return;
  }
  Bytes whole(begun.owned.data(), begun.owned.data() + begun.owned.size());
  whole.insert(whole.end(), begun.borrowed.begin(), begun.borrowed.end());
  begun.owned = std::move(whole);
  begun.borrowed = {};  // `queued_blocks` counts it no longer
  begun.keep = nullptr;
}

void Core::forget_blocks() {
  for (auto& [id, conn] : conns_) {
    if (conn.role == Role::bulk) drop_blocks(conn);
  }
}

}  // namespace ringfold
