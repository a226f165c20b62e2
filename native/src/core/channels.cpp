#include "ringfold/channels.hpp"

#include <algorithm>

namespace ringfold {
namespace {

template <typename T>
void append(std::vector<T>& to, std::vector<T> from) {
  if (to.empty()) to = std::move(from);
  else to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

}  // namespace

Channel& Channels::at(std::uint32_t number) {
  while (channels_.size() <= number) {
    channels_.push_back(
        std::make_unique<Channel>(static_cast<std::uint32_t>(channels_.size()), epoch_, advice_, planted_));
    channels_.back()->set_first_sequence(first_sequence_);
  }
  return *channels_[number];
}

void Channels::command(std::uint32_t number, ChannelCommand command) {
  if (number > 0 && driver_ != nullptr && driver_->post(number, command)) return;
  at(number).execute(command);
}

Channel* Channels::of(ConnId conn) const {
  for (const auto& channel : channels_) {
    if (channel->has(conn)) return channel.get();
  }
  return nullptr;
}

void Channels::set_first_sequence(std::uint32_t first) {
  first_sequence_ = first;
  for (const auto& channel : channels_) channel->set_first_sequence(first);
}

void Channels::install(Ns now) {
  at(static_cast<std::uint32_t>(in_use() - 1));
  for (const auto& channel : channels_) channel->install(now);
}

void Channels::forget_tags() {
  for (const auto& channel : channels_) channel->forget_tags();
}

void Channels::close_link(const Link::Key& key) {
  for (const auto& channel : channels_) channel->close_link(key);
}

bool Channels::are_meshed() const {
  return std::all_of(channels_.begin(), channels_.begin() + static_cast<std::ptrdiff_t>(in_use()),
                     [](const auto& channel) { return channel->is_meshed(); });
}

std::vector<LaneInfo> Channels::lanes() const {
  std::vector<LaneInfo> out;
  for (const auto& channel : channels_) append(out, channel->lanes());
  std::sort(out.begin(), out.end(), [](const LaneInfo& a, const LaneInfo& b) { return a.conn < b.conn; });
  return out;
}

std::vector<LaneInfo> Channels::take_new_lanes() {
  std::vector<LaneInfo> out;
  for (const auto& channel : channels_) append(out, channel->take_new_lanes());
  return out;
}

std::vector<ConnId> Channels::take_closing() {
  std::vector<ConnId> out;
  for (const auto& channel : channels_) append(out, channel->take_closing());
  return out;
}

std::vector<ConnId> Channels::take_dirty() {
  std::vector<ConnId> out;
  for (const auto& channel : channels_) append(out, channel->take_dirty());
  return out;
}

bool Channels::has_dirty() const {
  return std::any_of(channels_.begin(), channels_.end(), [](const auto& channel) { return channel->has_dirty(); });
}

bool Channels::has_shared() const {
  return std::any_of(channels_.begin(), channels_.end(), [](const auto& channel) { return channel->has_shared(); });
}

bool Channels::shared_in_flight() const {
  return std::any_of(channels_.begin(), channels_.end(),
                     [](const auto& channel) { return channel->shared_in_flight(); });
}

void Channels::shift(Ns gap) {
  for (const auto& channel : channels_) channel->shift(gap);
}

Ns Channels::stalled(Ns now, bool outgoing, Ns oldest) const {
  Ns longest = 0;
  for (const auto& channel : channels_) longest = std::max(longest, channel->stalled(now, outgoing, oldest));
  return longest;
}

Ns Channels::starved(Ns now, Ns oldest) const {
  Ns longest = 0;
  for (const auto& channel : channels_) {
    if (channel->is_waiting()) longest = std::max(longest, now - std::max(oldest, channel->last_received()));
  }
  return longest;
}

Stats Channels::stats() const {
  Stats sum;
  for (const auto& channel : channels_) sum += channel->stats();
  return sum;
}

std::array<std::uint64_t, max_paths> Channels::path_rates(Ns now, PeerId peer) const {
  std::array<std::uint64_t, max_paths> rates{};
  for (const auto& channel : channels_) {
    const auto its = channel->path_rates(now, peer);
    for (std::size_t path = 0; path < max_paths; ++path) rates[path] += its[path];
  }
  return rates;
}

// Of several channels: the mean of their smoothed RTTs, and the minimum of their minima.
std::array<Rtt, max_paths> Channels::path_rtts(Ns now, PeerId peer) const {
  std::array<Rtt, max_paths> rtts{};
  std::array<Ns, max_paths> counted{};
  for (const auto& channel : channels_) {
    const auto its = channel->path_rtts(now, peer);
    for (std::size_t path = 0; path < max_paths; ++path) {
      if (its[path].smoothed == 0) continue;
      ++counted[path];
      rtts[path].smoothed += its[path].smoothed;
      const Ns min = its[path].min;
      if (min > 0 && (rtts[path].min == 0 || min < rtts[path].min)) rtts[path].min = min;
    }
  }
  for (std::size_t path = 0; path < max_paths; ++path) {
    if (counted[path] > 0) rtts[path].smoothed /= counted[path];
  }
  return rtts;
}

std::array<std::uint64_t, max_paths> Channels::path_bytes(bool to_next) const {
  std::array<std::uint64_t, max_paths> bytes{};
  for (const auto& channel : channels_) {
    const auto its = channel->path_bytes(to_next);
    for (std::size_t path = 0; path < max_paths; ++path) bytes[path] += its[path];
  }
  return bytes;
}

}  // namespace ringfold
