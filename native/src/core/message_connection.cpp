#include "ringfold/message_connection.hpp"

#include <algorithm>

#include "ringfold/bulk_channel.hpp"

namespace ringfold {
namespace {

constexpr std::size_t max_read_bytes = 1 << 20;

void write_head(std::byte* at, ControlFrame kind, std::size_t bytes) {
  const auto length = static_cast<std::uint32_t>(bytes + 1);
  std::memcpy(at, &length, sizeof length);
  at[sizeof length] = static_cast<std::byte>(kind);
}

}  // namespace

MessageConnection::MessageConnection() = default;
MessageConnection::MessageConnection(MessageConnection&&) noexcept = default;
MessageConnection::~MessageConnection() = default;

Bytes head_of(ControlFrame kind, std::size_t bytes) {
  Bytes head(control_head_bytes);
  write_head(head.data(), kind, bytes);
  return head;
}

void MessageConnection::queue(MessageFrame frame) {
  tx.push_before(std::move(frame), [](const MessageFrame& queued) { return queued.is_filler; });
}

void MessageConnection::queue(ControlFrame kind, const std::byte* body, std::size_t bytes) {
  Bytes whole(control_head_bytes + bytes);
  write_head(whole.data(), kind, bytes);
  if (bytes > 0) std::memcpy(whole.data() + control_head_bytes, body, bytes);
  MessageFrame frame;
  frame.owned = std::move(whole);
  frame.total = frame.owned.size();
  queue(std::move(frame));
}

std::span<std::byte> MessageConnection::message_space(std::size_t head_space) {
  if (rx.size() < control_head_bytes) return rx.space(head_space);
  std::uint32_t length = 0;
  std::memcpy(&length, rx.data(), sizeof length);
  return rx.space(std::min<std::size_t>(sizeof length + length - rx.size(), max_read_bytes));
}

std::optional<MessageConnection::Incoming> MessageConnection::next_frame(std::string& why) {
  const std::size_t have = rx.size();
  if (have < control_head_bytes) return std::nullopt;
  const std::byte* at = rx.data();
  std::uint32_t length = 0;
  std::memcpy(&length, at, sizeof length);
  const auto kind = static_cast<ControlFrame>(at[4]);
  const std::size_t limit = is_control ? max_control_bytes : max_handshake_bytes;
  if (length < 1 || length > limit) {
    why = "a frame of " + std::to_string(length) + " bytes (limit " + std::to_string(limit) + ")";
    return std::nullopt;
  }
  if (kind != ControlFrame::message && (!is_control || kind > ControlFrame::evidence)) {
    why = "unexpected frame kind " + std::to_string(static_cast<int>(kind));
    return std::nullopt;
  }
  if (have < sizeof length + length) return std::nullopt;
  rx.consume(sizeof length + length);
  return Incoming{kind, at + control_head_bytes, length - 1};
}

}  // namespace ringfold
