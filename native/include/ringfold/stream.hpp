// What all connections have in common: bytes that were read and not used yet, and frames that wait to be sent.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "ringfold/op_spec.hpp"

namespace ringfold {

// At most one incomplete frame, and what was read beyond it. What is at the front stays where it is until more space is
// wanted than is left behind it.
class ReceiveBuffer {
 public:
  std::size_t size() const { return end_ - begin_; }
  const std::byte* data() const { return bytes_.data() + begin_; }
  std::span<const std::byte> bytes() const { return {data(), size()}; }
  void consume(std::size_t count) { begin_ += count; }
  void filled(std::size_t count) { end_ += count; }
  // Where to read up to `wanted` bytes to.
  std::span<std::byte> space(std::size_t wanted) {
    if (begin_ == end_) begin_ = end_ = 0;
    if (bytes_.size() - end_ < wanted && begin_ > 0) {
      std::memmove(bytes_.data(), bytes_.data() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
    if (bytes_.size() - end_ < wanted) bytes_.resize(end_ + wanted);
    return {bytes_.data() + end_, wanted};
  }

 private:
  Bytes bytes_;
  std::size_t begin_ = 0, end_ = 0;
};

// Frames that wait to be sent, the first of them perhaps in part. A Frame has `sent`, `total`, and `visit(add)`, which
// calls add(at, bytes) for each contiguous piece of it, in order.
template <typename Frame>
class SendQueue {
 public:
  bool empty() const { return frames_.empty(); }
  std::size_t size() const { return frames_.size(); }
  std::size_t bytes() const { return bytes_; }  // that are not sent yet
  Frame& operator[](std::size_t at) { return frames_[at]; }
  const Frame& operator[](std::size_t at) const { return frames_[at]; }
  auto begin() { return frames_.begin(); }
  auto end() { return frames_.end(); }
  auto begin() const { return frames_.begin(); }
  auto end() const { return frames_.end(); }

  void push(Frame frame) {
    bytes_ += frame.total - frame.sent;
    frames_.push_back(std::move(frame));
  }

  // Before all frames at the end that have not begun and that `yields` says can wait.
  template <typename Yields>
  void push_before(Frame frame, Yields yields) {
    bytes_ += frame.total - frame.sent;
    auto at = frames_.end();
    while (at != frames_.begin() && std::prev(at)->sent == 0 && yields(*std::prev(at))) --at;
    frames_.insert(at, std::move(frame));
  }

  // Takes out a frame.
  Frame take(std::size_t at) {
    Frame frame = std::move(frames_[at]);
    frames_.erase(frames_.begin() + static_cast<std::ptrdiff_t>(at));
    bytes_ -= frame.total - frame.sent;
    return frame;
  }

  template <typename Drop>
  void erase_if(Drop drop) {
    std::erase_if(frames_, [&](Frame& frame) {
      if (!drop(frame)) return false;
      bytes_ -= frame.total - frame.sent;
      return true;
    });
  }

  // Fills iovecs with what may be sent now, and returns how many.
  std::size_t gather(iovec* out, std::size_t most) const {
    std::size_t count = 0;
    for (const Frame& frame : frames_) {
      if (count + 2 > most) break;
      std::size_t skip = frame.sent;
      frame.visit([&](const std::byte* at, std::size_t bytes) {
        if (skip >= bytes) {
          skip -= bytes;
          return;
        }
        if (count < most) out[count++] = {const_cast<std::byte*>(at) + skip, bytes - skip};
        skip = 0;
      });
      if (count == most) break;  // perhaps not all pieces: nothing may follow
    }
    return count;
  }

  // So many bytes were sent. `complete(frame, left)` for each frame that is through; `left` bytes were sent after it.
  template <typename Complete>
  void sent(std::size_t bytes, Complete complete) {
    bytes_ -= bytes;
    while (bytes > 0) {
      Frame& frame = frames_.front();
      const std::size_t step = std::min(bytes, frame.total - frame.sent);
      frame.sent += step;
      bytes -= step;
      if (frame.sent < frame.total) return;
      complete(frame, bytes);
      frames_.pop_front();
    }
  }

 private:
  std::deque<Frame> frames_;
  std::size_t bytes_ = 0;
};

// A connection, whatever it carries.
struct Connection {
  ConnId id = 0;
  bool held = false;   // not to be read now
  bool dirty = false;  // in the list of those to be flushed
  ReceiveBuffer rx{};
};

// Connections to be flushed, each once, in the order in which they got something to send.
class FlushList {
 public:
  void add(Connection& conn) {
    if (!std::exchange(conn.dirty, true)) ids_.push_back(conn.id);
  }
  bool empty() const { return ids_.empty(); }
  std::vector<ConnId> take() { return std::exchange(ids_, {}); }

 private:
  std::vector<ConnId> ids_;
};

}  // namespace ringfold
