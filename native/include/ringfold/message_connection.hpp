// A connection that carries messages: in its handshake, to the master, or to another peer beside the ring. A frame is
// `u32 length | u8 kind | body`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "ringfold/stream.hpp"

namespace ringfold {

// Keeps the memory behind blocks alive. Any thread may release it.
using MemoryOwner = std::shared_ptr<void>;

// Bytes of its own and after them bytes that it borrows: a block of the caller's memory, or filler.
struct MessageFrame {
  Payload owned{};
  std::span<const std::byte> borrowed{};
  MemoryOwner keep{};
  bool is_filler = false;
  std::size_t sent = 0;
  std::size_t total = 0;

  template <typename Add>
  void visit(Add add) const {
    add(owned.data(), owned.size());
    if (!borrowed.empty()) add(borrowed.data(), borrowed.size());
  }
};

class BulkChannel;

struct MessageConnection : Connection {
  MessageConnection();
  MessageConnection(MessageConnection&&) noexcept;
  MessageConnection& operator=(MessageConnection&&) = delete;
  ~MessageConnection();

  bool accepted = false;  // not dialled
  bool is_control = false;
  bool closing = false;  // what is queued is sent, then it is closed
  Ns closing_since = 0;
  std::size_t offered = 0;  // how much could be read at once
  std::uint64_t received_total = 0, sent_total = 0;
  SendQueue<MessageFrame> tx{};
  std::unique_ptr<BulkChannel> bulk{};

  bool is_handshake() const { return !is_control && bulk == nullptr; }

  // Queues a frame, before all filler that has not begun.
  void queue(MessageFrame frame);
  void queue(ControlFrame kind, const std::byte* body, std::size_t bytes);
  // Where to read the rest of a message, or the head of the next one.
  std::span<std::byte> message_space(std::size_t head_space);

  struct Incoming {
    ControlFrame kind;
    const std::byte* body;
    std::size_t bytes;
  };
  // The next frame of a handshake or control connection. Nothing, with a reason: the other side breaks the protocol.
  std::optional<Incoming> next_frame(std::string& why);
};

// The head of a frame with so many bytes of body.
Bytes head_of(ControlFrame kind, std::size_t bytes);

}  // namespace ringfold
