#include "ringfold/control_channel.hpp"

namespace ringfold {

void ControlChannel::open(Ns now, ConnId conn, Ns heartbeat, Ns dead_after) {
  *this = {};
  conn_ = conn;
  heartbeat_ = heartbeat;
  dead_after_ = dead_after;
  last_received_ = last_echoed_ = next_ = now;
}

void ControlChannel::acknowledged(Ns now, std::uint64_t sent_total, std::uint64_t unacknowledged) {
  const std::uint64_t total = sent_total - std::min(unacknowledged, sent_total);
  if (total <= acknowledged_total_) return;
  acknowledged_total_ = total;
  if (unacknowledged > 0) last_echoed_ = now;  // the large frame is the kernel's by now
}

bool ControlChannel::on_heartbeat(Ns now, const std::byte* body, std::size_t bytes) {
  Reader reader(body, bytes);
  std::uint64_t number = 0, echo = 0;
  if (!reader.get(number) || !reader.get(echo)) return false;
  received_number_ = std::max(received_number_, number);
  if (echo > echoed_number_) {
    echoed_number_ = echo;
    last_echoed_ = now;
  }
  silence_reported_ = false;
  return true;
}

void ControlChannel::shift(Ns gap) {
  last_received_ += gap;
  last_echoed_ += gap;
}

std::pair<std::uint64_t, std::uint64_t> ControlChannel::beat(Ns now) {
  next_ = now + heartbeat_;
  return {++number_, received_number_};
}

std::optional<Ns> ControlChannel::new_silence(Ns now) {
  const Ns silent = now - std::min(last_received_, last_echoed_);
  if (!is_open() || silent <= dead_after_ || std::exchange(silence_reported_, true)) return std::nullopt;
  return silent;
}

}  // namespace ringfold
