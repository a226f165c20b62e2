// The engine without I/O: bytes and `now` in, bytes and events out. The core routes; its parts decide.
//
//   MessageConnection  a connection in its handshake. It delivers one message at a time and then holds, so that nothing
//                      behind the message is parsed before the role of the connection is decided
//   ControlChannel     the connection to the master: messages for Python, heartbeats and evidence
//   BulkChannel        a connection beside the ring: messages for Python, blocks of shared state, filler
//   Channels           each has lanes to both neighbours, grouped into links, and the parts of ops that they carry
//   OpTable            ops from their call to their end: tags, evidence, verdicts
//   EpochState         the installed epoch
//
// Invariant: what a channel reports during a call of the core is handled before the call returns (`route`).
//
// Who may touch what. A channel may be driven by a thread of its own, which takes and brings the bytes of its lanes,
// and carries out commands (Channel), and nothing else; what it then reports is routed later. Everything here is for
// one thread at a time. While channels are driven, that thread may use the connections that are no lanes, channel 0 and
// ops: submit() and find(), evidence from the master, and on_reports() for what a channel has reported about ops. All
// other calls, and ticks that are wide, are for when every channel stands still, without an outstanding command.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ringfold/bulk_channel.hpp"
#include "ringfold/channels.hpp"
#include "ringfold/control_channel.hpp"
#include "ringfold/epoch_state.hpp"
#include "ringfold/event.hpp"
#include "ringfold/op_table.hpp"
#include "ringfold/planted.hpp"

namespace ringfold {

class Core {
 public:
#ifdef RINGFOLD_PLANTED
  explicit Core(Planted planted = {}) : planted_(planted) {}
#else
  Core() = default;
#endif
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // Connections. The shell opens and loses them; the core lists those to close (take_closing).
  ConnId open(std::string remote, bool accepted);
  void opened(ConnId conn);
  void lost(Ns now, ConnId conn, std::string_view reason);
  void send(ConnId conn, const void* body, std::size_t bytes);
  void resume(Ns now, ConnId conn);
  void make_control(Ns now, ConnId conn, Ns heartbeat, Ns dead_after);
  void promote(Ns now, ConnId conn, bool outgoing, PeerId peer, std::uint32_t lane, Sharing sharing = {});
  void close(ConnId conn);
  std::vector<ConnId> take_closing();
  // Connections that are no lanes are to be closed, or will carry filler.
  bool wants_settling() const { return !closing_.empty() || !filling_.empty(); }
  // Accepted connections that have not become anything yet.
  std::size_t unauthenticated() const;

  // Bytes. `receive_space` is empty while the connection must not be read. `gather` fills iovecs with what may be sent.
  std::span<std::byte> receive_space(ConnId conn);
  void received(Ns now, ConnId conn, std::size_t bytes);
  std::size_t gather(ConnId conn, iovec* out, std::size_t most);
  void sent(Ns now, ConnId conn, std::size_t bytes);
  std::vector<ConnId> take_dirty();
  bool has_dirty() const { return has_dirty_messages() || channels_.has_dirty(); }
  // The same of the connections that are no lanes.
  std::vector<ConnId> take_dirty_messages();
  bool has_dirty_messages() const { return !flush_.empty(); }
  void touch(ConnId conn);
  // What the transport reports about a lane or the control connection: bytes that the other side's kernel has not
  // acknowledged, the smoothed RTT, and the minimum RTT (0: unknown).
  void acknowledged(Ns now, ConnId conn, std::uint64_t unacknowledged, Ns rtt = 0, Ns min_rtt = 0);
  // Whether payload may come on a connection; between two peers one direction of each lane is nearly silent.
  bool expects(ConnId conn) const {
    const Channel* channel = channels_.of(conn);
    return channel == nullptr || channel->expects(conn);
  }
  // The control connection, if its last echo is overdue (0 otherwise): are its bytes acknowledged, at least?
  ConnId late_echo(Ns now) const { return control_.is_echo_late(now) ? control_.conn() : 0; }
  Ns dead_after() const { return control_.dead_after(); }

  // What the channels have reported, and what the ops have for the master.
  void route(Ns now);
  // The same of channel 0, as long as it concerns no other one: others may be driven meanwhile.
  void route_first(Ns now);
  // Reports about ops that were taken from a channel.
  void on_reports(Ns now, const std::vector<Report>& reports);
  void set_channel_driver(ChannelDriver* driver) { channels_.set_driver(driver); }
  Channel& channel(std::uint32_t number) { return channels_.at(number); }

  // Lanes and their paths.
  std::vector<LaneInfo> lanes() const { return channels_.lanes(); }
  // Lanes that were promoted since the last call.
  std::vector<LaneInfo> take_new_lanes() { return channels_.take_new_lanes(); }
  bool has_shared() const { return channels_.has_shared(); }
  // Shared links: whether a lane of one has bytes in flight.
  bool shared_in_flight() const { return channels_.shared_in_flight(); }
  // How many bytes the kernel should hold unsent for a lane among several. 0: as many as it likes.
  std::size_t unsent_wanted(ConnId conn) const {
    const Channel* channel = channels_.of(conn);
    return channel == nullptr ? 0 : channel->unsent_wanted(conn);
  }
  void set_path_shares(PeerId peer, const PathShares& shares);
  void set_path_hints(const PathHints* hints) { advice_.set_hints(hints); }
  // The advice of the hints is another one: lanes that it held back look again.
  void advice_changed();
  // Bytes per second that were acknowledged on each path to a peer while some were in flight; 0: none in the last
  // second.
  std::array<std::uint64_t, max_paths> path_rates(Ns now, PeerId peer) const { return channels_.path_rates(now, peer); }
  // The RTT on each path to a peer, over the lanes of both links to it; zeros: none was measured in the last second.
  std::array<Rtt, max_paths> path_rtts(Ns now, PeerId peer) const { return channels_.path_rtts(now, peer); }
  // Bytes of payload assigned to each path of the link to the next (or previous) peer since the epoch began; what
  // another path took over is counted there.
  std::array<std::uint64_t, max_paths> path_bytes(bool to_next) const { return channels_.path_bytes(to_next); }

  // Bulk connections. Commands for a connection that is closed are ignored; std::invalid_argument if it is no bulk
  // connection, and for blocks that cannot be sent.
  void make_bulk(Ns now, ConnId conn);
  void send_blocks(Ns now, ConnId conn, const std::vector<Block>& blocks, const MemoryOwner& keep);
  void expect_blocks(ConnId conn, std::uint64_t batch, std::vector<Block> blocks, MemoryOwner keep);
  void fill(ConnId conn, bool on);
  void sample(Ns now, ConnId conn, Ns every);
  bool is_bulk(ConnId conn) const;
  // A connection that is no lane.
  bool is_message(ConnId conn) const { return conns_.contains(conn); }
  bool is_control(ConnId conn) const { return conn == control_.conn(); }
  std::vector<ConnId> take_filling() { return std::exchange(filling_, {}); }
  void forget_blocks();

  // Epochs.
  const EpochState& epoch() const { return epoch_; }
  std::vector<SealedOp> seal(std::uint32_t epoch);
  void settle(Ns now, std::uint32_t epoch, const std::vector<Verdict>& verdicts, const Bytes& default_reason);
  void install(Ns now, EpochSpec spec);

  // Ops: what needs no routing is called on the table itself.
  OpTable& ops() { return ops_; }
  const OpTable& ops() const { return ops_; }
  // Throws std::invalid_argument when the tag is in flight. Without a driver of channels it is routed, too.
  std::uint64_t submit(Ns now, OpSpec spec);
  OpPtr find(std::uint64_t id) const { return ops_.find(id); }

  // What the program reports about itself: the next heartbeat carries it, and the first one to every new master.
  void set_report(Bytes report) {
    report_ = std::move(report);
    has_new_report_ = true;
  }

  // Time and events. A wide tick looks at all channels.
  bool is_tick_wide(Ns now) const;
  void tick(Ns now);
  Ns next_deadline() const { return control_.next_deadline(); }
  std::optional<Event> next_event() { return events_.pop(); }
  void push_event(Event event) { events_.push(std::move(event)); }
  bool has_events() const { return !events_.empty(); }
  Stats stats() const;

 private:
  MessageConnection* find_conn(ConnId id);
  MessageConnection* find_bulk(ConnId id);
  void drop(ConnId id, std::string_view reason);
  void violation(ConnId id, std::string_view reason);
  void process(Ns now, MessageConnection& conn);
  void on_control_frame(Ns now, const MessageConnection::Incoming& frame, std::string& why);
  void on_report(Ns now, const Report& report);
  void send_dones();
  void beat(Ns now);
  void close_late(Ns now);

#ifdef RINGFOLD_PLANTED
  Planted planted_;
#else
  static constexpr Planted planted_{};
#endif
  Stats stats_;  // of the connections that are no lanes
  EventQueue events_;
  EpochState epoch_;
  ShareSources advice_;
  FlushList flush_;
  std::map<ConnId, MessageConnection> conns_;
  ConnId next_conn_ = 1;
  std::vector<ConnId> closing_;
  std::vector<ConnId> filling_;  // bulk connections that began to fill since the last take_filling
  ControlChannel control_;
  Channels channels_{epoch_, advice_, planted_};
  Bytes report_;
  bool has_new_report_ = false;
  OpTable ops_{epoch_, channels_, events_, planted_};
  Ns last_tick_ = 0;
};

}  // namespace ringfold
