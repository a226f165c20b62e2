// All channels of a core. An epoch's record says how many of them carry ops; a lane says which one it belongs to.
//
// Channel 0 carries what is about an op as a whole: Open, Absent and Done. The others carry segments, and Ready.
//
// Channels share nothing but the epoch and the advice about paths, which only change while nobody drives any of them.
// What is asked about all of them together is answered here. What the op table decides about a part goes to its channel
// as a command, so that no other channel has to stand still for it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ringfold/channel.hpp"

namespace ringfold {

// Carries out commands for channels that other threads drive.
class ChannelDriver {
 public:
  virtual ~ChannelDriver() = default;
  // True: takes the command, which will be carried out after all earlier ones for this channel. False: nobody else
  // drives the channel now, and no command for it is outstanding.
  virtual bool post(std::uint32_t channel, ChannelCommand& command) = 0;
};

class Channels {
 public:
  Channels(const EpochState& epoch, const ShareSources& advice, const Planted& planted)
      : epoch_(epoch), advice_(advice), planted_(planted) {
    at(0);
  }

  // The channel with this number.
  Channel& at(std::uint32_t number);
  // The channel that a lane belongs to; nullptr: the connection is no lane.
  Channel* of(ConnId conn) const;
  // Without a driver, or while all stands still, a command is carried out at once. Channel 0 is always at hand.
  void set_driver(ChannelDriver* driver) { driver_ = driver; }
  bool are_driven() const { return driver_ != nullptr; }
  void command(std::uint32_t number, ChannelCommand command);
  // Those that carry ops in the installed epoch, and all that there are.
  std::size_t in_use() const { return epoch_.spec().channels; }
  const std::vector<std::unique_ptr<Channel>>& all() const { return channels_; }

  void set_first_sequence(std::uint32_t first);
  void install(Ns now);
  void forget_tags();
  // A link is lost with its lanes in every channel.
  void close_link(const Link::Key& key);

  // Whether direct lanes lead to all members that are no neighbours, in all channels that carry ops. Other threads may
  // drive them meanwhile.
  bool are_meshed() const;

  std::vector<LaneInfo> lanes() const;
  std::vector<LaneInfo> take_new_lanes();
  std::vector<ConnId> take_closing();
  std::vector<ConnId> take_dirty();
  bool has_dirty() const;
  bool has_shared() const;
  bool shared_in_flight() const;
  void shift(Ns gap);
  // A link stands still if it does in one of its channels.
  Ns stalled(Ns now, bool outgoing, Ns oldest) const;
  // For how long nothing came from the previous peer, of what is missing here, for ops that began at `oldest` or later.
  Ns starved(Ns now, Ns oldest) const;
  Stats stats() const;

  std::array<std::uint64_t, max_paths> path_rates(Ns now, PeerId peer) const;
  std::array<Rtt, max_paths> path_rtts(Ns now, PeerId peer) const;
  std::array<std::uint64_t, max_paths> path_bytes(bool to_next) const;

 private:
  const EpochState& epoch_;
  const ShareSources& advice_;
  const Planted& planted_;
  ChannelDriver* driver_ = nullptr;
  std::uint32_t first_sequence_ = 0;
  std::vector<std::unique_ptr<Channel>> channels_;
};

}  // namespace ringfold
