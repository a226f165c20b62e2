#include "ringfold/bulk_channel.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>

#include "ringfold/hash.hpp"

namespace ringfold {
namespace {

constexpr std::size_t filler_frame_bytes = 64 * 1024;
constexpr std::size_t filler_ahead_bytes = 4 * filler_frame_bytes;
constexpr std::size_t filler_read_bytes = 256 * 1024;
constexpr std::size_t read_ahead_bytes = 64 * 1024;  // of messages and of blocks that are smaller than this
constexpr std::size_t max_queued_blocks = std::size_t{64} << 20;

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

bool BulkChannel::send_blocks(const std::vector<Block>& blocks, const MemoryOwner& keep, std::string& why) {
  check_sizes(blocks);
  std::size_t bytes = 0;
  for (const Block& block : blocks) bytes += block.bytes;
  // The other side chooses what it requests, so this is its fault and not the caller's.
  if (queued_blocks_ + bytes > max_queued_blocks) {
    why = "it asks for blocks and does not read them: more than " + std::to_string(max_queued_blocks >> 20) +
          " MiB would wait";
    return false;
  }
  queued_blocks_ += bytes;
  for (const Block& block : blocks) {
    MessageFrame frame;
    frame.owned = head_of(ControlFrame::block, block.bytes);
    frame.borrowed = {block.at, block.bytes};
    frame.keep = keep;
    frame.total = control_head_bytes + block.bytes;
    conn_.queue(std::move(frame));
  }
  return true;
}

void BulkChannel::expect(std::uint64_t batch, std::vector<Block> blocks, MemoryOwner keep) {
  check_sizes(blocks);
  batches_.push_back({batch, std::move(blocks), std::move(keep)});
}

bool BulkChannel::fill(bool on) {
  if (std::exchange(fill_, on) == on) return false;
  if (!on) conn_.tx.erase_if([](const MessageFrame& frame) { return frame.is_filler && frame.sent == 0; });
  return on;
}

void BulkChannel::sample(Ns now, Ns every) {
  if (every < 0) throw std::invalid_argument("a sample every " + std::to_string(every) + " ns");
  sample_every_ = every;
  next_sample_ = now + every;
}

// Receiving.

std::span<std::byte> BulkChannel::receive_space() {
  if (in_block_) return {expected().at + filled_, expected().bytes - filled_};
  std::size_t wanted = read_ahead_bytes;
  if (filler_seen_) {
    wanted = filler_read_bytes;
  } else if (!batches_.empty() && expected().bytes >= read_ahead_bytes && conn_.rx.size() < control_head_bytes) {
    // A head alone, so that none of a large block has to be copied to where it belongs.
    wanted = control_head_bytes - conn_.rx.size();
  }
  return conn_.message_space(wanted);
}

bool BulkChannel::received(Ns now, std::size_t bytes, bool was_all, std::string& why) {
  if (in_block_) filled_ += bytes;
  else conn_.rx.filled(bytes);
  if (!process(now, why)) return false;
  if (was_all) count_is_whole(now);
  take_sample(now);
  return true;
}

bool BulkChannel::process(Ns now, std::string& why) {
  while (!conn_.closing && step(now, why)) {
  }
  return why.empty();
}

// One step through what has been read; false when it is used up, or the connection is.
bool BulkChannel::step(Ns now, std::string& why) {
  const std::size_t have = conn_.rx.size();
  if (in_block_) {
    const Block& block = expected();
    const std::size_t count = std::min(have, block.bytes - filled_);
    if (count > 0) std::memcpy(block.at + filled_, conn_.rx.data(), count);
    conn_.rx.consume(count);
    filled_ += count;
    if (filled_ < block.bytes) return false;
    block_is_in();
    return true;
  }
  if (filler_left_ > 0) {
    const std::size_t count = std::min(have, filler_left_);
    conn_.rx.consume(count);
    filler_left_ -= count;
    count_filler(now, count);
    return count > 0;
  }
  return head(why);
}

// The head of a frame; a message as a whole.
bool BulkChannel::head(std::string& why) {
  if (conn_.rx.size() < control_head_bytes) return false;
  const std::byte* at = conn_.rx.data();
  std::uint32_t length = 0;
  std::memcpy(&length, at, sizeof length);
  const auto kind = static_cast<ControlFrame>(at[4]);
  const std::size_t bytes = std::size_t{length} - 1;
  const std::size_t limit = kind == ControlFrame::filler ? max_filler_bytes + 1 : max_bulk_bytes;
  if (length < 1 || length > limit) {
    why = "a frame of " + std::to_string(length) + " bytes (limit " + std::to_string(limit) + ")";
    return false;
  }
  switch (kind) {
    case ControlFrame::message:
      return take_message(at + control_head_bytes, bytes);
    case ControlFrame::filler:
      filler_left_ = bytes;
      break;
    case ControlFrame::block:
      if (!begin_block(bytes, why)) return false;
      break;
    default:
      why = "unexpected frame kind " + std::to_string(static_cast<int>(kind));
      return false;
  }
  conn_.rx.consume(control_head_bytes);
  return true;
}

bool BulkChannel::take_message(const std::byte* at, std::size_t bytes) {
  if (conn_.rx.size() < control_head_bytes + bytes) return false;
  Event event{.kind = Event::Kind::message, .conn = conn_.id};
  event.body.assign(at, at + bytes);
  conn_.rx.consume(control_head_bytes + bytes);
  events_.push(std::move(event));
  return true;
}

bool BulkChannel::begin_block(std::size_t bytes, std::string& why) {
  if (batches_.empty()) {
    why = "a block that was not requested";
    return false;
  }
  if (bytes != expected().bytes) {
    why =
        "a block of " + std::to_string(bytes) + " bytes where " + std::to_string(expected().bytes) + " were requested";
    return false;
  }
  in_block_ = true;
  filled_ = 0;
  return true;
}

void BulkChannel::block_is_in() {
  Batch& batch = batches_.front();
  const Block& block = expected();
  if (block.hash && hash_block(block.at, block.bytes) != *block.hash) {
    batch.bad.push_back(static_cast<std::uint32_t>(batch.next));
  }
  in_block_ = false;
  filled_ = 0;
  if (++batch.next < batch.blocks.size()) return;
  Event event{.kind = Event::Kind::blocks, .conn = conn_.id, .batch = batch.number};
  event.bad = std::move(batch.bad);
  batches_.pop_front();
  events_.push(std::move(event));
}

void BulkChannel::count_filler(Ns now, std::size_t bytes) {
  if (bytes == 0) return;
  if (!filler_seen_) {
    filler_seen_ = true;
    filler_since_ = now;
    next_sample_ = now + sample_every_;
  }
  if (now > filler_since_) filler_bytes_ += bytes;
}

void BulkChannel::count_is_whole(Ns now) {
  if (filler_bytes_ == counted_) return;
  counted_ = filler_bytes_;
  counted_at_ = now;
  is_recounted_ = true;
}

void BulkChannel::take_sample(Ns now) {
  if (!filler_seen_ || sample_every_ == 0 || conn_.closing || now < next_sample_) return;
  if (!is_recounted_ && filler_bytes_ > counted_) {
    if (behind_since_ == 0) behind_since_ = now;
    if (now - behind_since_ < sample_every_ / 4) return;
    count_is_whole(now);
  }
  next_sample_ = now + sample_every_;
  is_recounted_ = false;
  behind_since_ = 0;
  events_.push({.kind = Event::Kind::sample,
                .conn = conn_.id,
                .elapsed = now - filler_since_,
                .counted = counted_ == 0 ? 0 : counted_at_ - filler_since_,
                .bytes = counted_});
}

// Sending.

void BulkChannel::pull() {
  static const Payload filler_head = head_of(ControlFrame::filler, filler_frame_bytes);
  while (fill_ && !conn_.closing && conn_.tx.bytes() < filler_ahead_bytes) {
    MessageFrame frame;
    frame.is_filler = true;
    frame.owned = filler_head;
    frame.borrowed = filler_bytes();
    frame.total = control_head_bytes + filler_frame_bytes;
    conn_.tx.push(std::move(frame));
  }
}

void BulkChannel::frame_is_through(const MessageFrame& frame) {
  if (!frame.is_filler) queued_blocks_ -= frame.borrowed.size();
}

// The rest of a block that has begun goes along if a message follows it, as a copy, because the caller's memory is its
// own again.
void BulkChannel::close() {
  batches_.clear();
  in_block_ = fill_ = false;
  queued_blocks_ = 0;
  auto& tx = conn_.tx;
  tx.erase_if([](const MessageFrame& frame) { return frame.sent == 0 && !frame.borrowed.empty(); });
  if (tx.empty() || tx[0].borrowed.empty()) return;
  if (tx.size() == 1) {
    tx.take(0);
    return;
  }
  MessageFrame& begun = tx[0];
  Bytes whole(begun.owned.data(), begun.owned.data() + begun.owned.size());
  whole.insert(whole.end(), begun.borrowed.begin(), begun.borrowed.end());
  begun.owned = std::move(whole);
  begun.borrowed = {};  // `queued_blocks_` counts it no longer
  begun.keep = nullptr;
}

}  // namespace ringfold
