// A channel: its own lanes to both neighbours, and to other members, and the part of every op that it carries over
// them. Without I/O: bytes and `now` in, bytes and reports out.
//
// A channel moves segments. It knows marks, Ready and data; what concerns an op as a whole (Open, Done, Absent, and
// that all its parts have all their segments) it only reports, and the core decides (`take_reports`). What the core has
// decided reaches it as commands (`ChannelCommand`) and by send().
//
// Epochs: a lane announces an epoch with a mark; frames of older epochs are drained, and a lane is not read beyond the
// mark of an epoch that is not installed here yet.
//
// Early segments. A neighbour that has not called an op yet stores its segments. How much it must be able to store, and
// how much it may be sent, is one number, by link and over all ops together, that both ends compute from the
// epoch's record. The sender counts what it sent of ops that the neighbour is not known to have called. Beyond the
// limit it sends no more of them. Any frame about an op shows that its sender has called it, so most ops need no Ready.
// But an op whose last segments are held back may wait for just that. So a peer that has received half the limit, for
// ops of which it has sent nothing, sends Ready for those that it has called (`on_early_bytes`): the other side is held
// back only by more than that.
//
// Direct lanes lead to members that are no neighbours in the ring. They carry Dones, on channel 0, and segments of ops
// that are reduced host by host. Whether they are up is for the core to know: without them Dones go around the ring.
//
// Who may touch it: one thread at a time, the one that drives it. The epoch and the advice about paths are only written
// while nobody drives any channel.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ringfold/link.hpp"
#include "ringfold/op.hpp"

namespace ringfold {

// What a channel has to say to the core.
struct Report {
  enum class Kind : std::uint8_t {
    op_frame,        // a frame about an op as a whole: `part`, `from`, `header`, `payload`
    parts_finished,  // all parts of an op have all their segments; the last of them came to `part`, `from` there
    parts_ended,     // all parts of a committed op have ended, `part` as the last one
    lane_lost,       // one of several lanes of a link: `conn`
    link_lost,       // the last one, or the neighbour broke the protocol: `link`
  };
  Kind kind;
  PartPtr part{};
  Side from = previous_side;
  FrameHeader header{};
  Payload payload{};
  ConnId conn = 0;
  Link::Key link{};
  std::string text{};
  bool died = false;  // link_lost: so has the neighbour's process
};

// What the core has decided, for a channel that another thread may be driving: then that thread carries it out, before
// anything that is decided later.
struct ChannelCommand {
  enum class Kind : std::uint8_t {
    begin,      // Channel::begin(`now`, `part`), and replay(`part`)
    end,        // Channel::end(`part`), committed
    violation,  // Channel::violation(`from`, `text`)
  };
  Kind kind;
  PartPtr part{};
  Ns now = 0;
  Side from = previous_side;
  std::string text{};
};

class Channel {
 public:
  Channel(std::uint32_t number, const EpochState& epoch, const ShareSources& advice, const Planted& planted);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Lanes. What is named by its connection is one of them: ask has() first.
  void add_lane(Ns now, Lane lane);
  bool has(ConnId id) const { return find(id) != nullptr; }
  // `died`: the process at its other end has, for certain.
  void lost(ConnId id, std::string reason, bool died = false);
  void close(ConnId id);
  // All lanes of a link, without a report: it was lost in another channel.
  void close_link(const Link::Key& key);
  std::vector<LaneInfo> lanes() const;
  std::vector<LaneInfo> take_new_lanes() { return std::exchange(new_lanes_, {}); }
  std::vector<ConnId> take_closing() { return std::exchange(closing_, {}); }
  std::vector<Report> take_reports() {
    has_wide_report_ = false;
    return std::exchange(reports_, {});
  }
  bool has_reports() const { return !reports_.empty(); }
  // Whether the core is to look at it: there is a report, or a lane to close.
  bool wants_core() const { return !reports_.empty() || !closing_.empty(); }
  // Whether that concerns other channels, too: then the core looks at it while all of them stand still.
  bool concerns_others() const { return has_wide_report_ || !closing_.empty(); }

  // Bytes; see Core.
  std::span<std::byte> receive_space(ConnId id);
  void received(Ns now, ConnId id, std::size_t bytes);
  // Instead of both, for a lane whose bytes are in memory already: handles the whole frames at the beginning of `bytes`
  // where they are, and returns how many bytes are used. Of a frame longer than `longest`, which will never be there as
  // a whole, it takes what is there.
  std::size_t take(Ns now, ConnId id, std::span<const std::byte> bytes, std::size_t longest);
  // From now on this lane goes through shared memory: its payloads have no CRC.
  void set_in_memory(ConnId id);
  std::size_t gather(ConnId id, iovec* out, std::size_t most);
  void sent(Ns now, ConnId id, std::size_t bytes);
  std::vector<ConnId> take_dirty();
  bool has_dirty() const { return !flush_.empty(); }
  void touch(ConnId id) {
    if (has(id)) flush_.add(lane(id));
  }
  void acknowledged(Ns now, ConnId id, std::uint64_t unacknowledged, Ns rtt, Ns min_rtt);
  // Whether something may come on a lane. Between two peers one direction of each lane is nearly silent; a direct lane
  // brings the Dones of ops whose parts are finished here, and segments of ops that are planned for it.
  bool expects(ConnId id) const;

  // Paths.
  std::size_t unsent_wanted(ConnId id) const { return lane(id).unsent_wanted(); }
  bool has_shared() const { return shared_lanes_ > 0; }
  bool shared_in_flight() const;
  void advice_changed();
  void advice_changed(PeerId peer);
  std::array<std::uint64_t, max_paths> path_rates(Ns now, PeerId peer) const;
  std::array<Rtt, max_paths> path_rtts(Ns now, PeerId peer) const;
  std::array<std::uint64_t, max_paths> path_bytes(bool to_next) const;

  // Parts. begin() takes one up, replay() applies what came before it; in between the core sends what it has to say
  // about the op, on channel 0. No frame may come in between: with Ready the neighbour gets back what it may send
  // early, and what came before still counts. After end() no lane reads from the caller's memory any more; the last
  // part of a committed op that ends is reported.
  void execute(const ChannelCommand& command);
  void begin(Ns now, const PartPtr& part);
  void replay(const PartPtr& part);
  // Whether segments of it came before it was called: replay() has to apply them.
  bool has_early(const OpPart& part) const;
  void end(const PartPtr& part, bool committed);
  // Ops whose memory is still being filled go on with what is there. True: some of them can.
  bool look_at_blocks();
  bool is_filling() const { return filling_ > 0; }
  // A frame about an op as a whole.
  void send(Side to, const FrameHeader& header, Payload payload);
  // The neighbour broke the protocol, as the core found: the link is dropped.
  void violation(Side from, std::string reason);
  // Whether every member that is no neighbour can be reached by a direct lane. For any thread.
  bool is_meshed() const { return meshed_.load(); }
  // Whether all its lanes go through shared memory.
  bool is_in_memory() const {
    return std::all_of(lanes_.begin(), lanes_.end(), [](const Place& place) { return place.lane->in_memory; });
  }

  // Epochs.
  void set_first_sequence(std::uint32_t first) { first_sequence_ = first; }
  void forget_tags();
  // Marks the lanes. What is held for this epoch is read with resume().
  void install(Ns now);
  void resume();

  // Time.
  void shift(Ns gap);
  // For how long nothing was acknowledged on the links of a direction, for ops that began at `oldest` or later, and
  // when something last came from the previous peer.
  Ns stalled(Ns now, bool outgoing, Ns oldest) const;
  Ns last_received() const;
  bool has_parts() const { return !running_.empty(); }
  // Something that runs here is missing: segments of a part, or Dones.
  bool is_waiting() const;

  const Stats& stats() const { return stats_; }

 private:
  struct Stashed {
    Side from;
    bool in_memory;  // it came without a CRC of its payload
    FrameHeader header;
    Bytes payload;
  };
  struct TagState {
    std::uint32_t next = 0;  // sequence
    PartPtr running{};
    std::vector<Stashed> stash{};
    std::size_t stash_bytes = 0;
  };

  // Where a lane is: a link keeps its lanes where they are.
  struct Place {
    ConnId id;
    Link* link;
    Lane* lane;
  };

  const Place* find(ConnId id) const {
    for (const Place& place : lanes_) {
      if (place.id == id) return &place;
    }
    return nullptr;
  }
  Lane& lane(ConnId id) { return *find(id)->lane; }
  const Lane& lane(ConnId id) const { return *find(id)->lane; }
  Link& link_of(ConnId id) { return *find(id)->link; }
  Link* link(Side side);
  template <typename Visit>
  void for_lanes(Visit visit);
  void forget_lane(ConnId id);
  void drop_link(Link& link, std::string reason, bool died = false);
  void report(Report report);
  void finished(const PartPtr& part, Side from);
  void violation(Link& link, std::string reason);

  // Where a frame came from, and how long that took from its first byte to its last (0: it is not known). What came
  // through shared memory has no CRC.
  struct Source {
    Side side;
    bool in_memory;
    PeerId peer = 0;
    Ns took = 0;
  };

  void process(Lane& lane);
  void process_read(Lane& lane, std::string& why);
  std::size_t process_frame(Lane& lane, std::span<const std::byte> bytes, std::string& why);
  bool on_frame(Lane& lane, const FrameHeader& header, const std::byte* payload, std::string& why);
  bool on_mark(Lane& lane, std::uint32_t epoch, std::string& why);
  bool on_part_frame(const PartPtr& part, Source from, const FrameHeader& header, const std::byte* payload,
                     std::string& why);
  bool on_data(const PartPtr& part, Source from, const FrameHeader& header, const std::byte* payload, std::string& why);
  bool stash(TagState& tag, const Lane& lane, Side from, const FrameHeader& header, const std::byte* payload,
             std::string& why);
  // Takes what is stashed for an op out of its tag. Earlier ops, which had no part here, are forgotten.
  std::vector<Stashed> take_stash(TagState& tag, std::uint32_t sequence);
  void look_at_mesh();
  TagState& tag_state(std::uint64_t tag) {
    return tags_.try_emplace(tag, TagState{.next = first_sequence_}).first->second;
  }

  void send_ready(OpPart& part, Side to);
  void on_early_bytes(Side from, std::size_t bytes);
  void on_neighbour_called(OpPart& part, Side side);
  void release_early(OpPart& part, Side to);

  PartPtr next_part_to_send(Side to) const;
  void pull(Link& link, Lane& lane);
  OutFrame segment_frame(const Lane& lane, const PartPtr& part, Sendable item);
  void flush_for(const OpPart& part);

  void note_sent(Ns now, Lane& lane, const OutFrame& frame) const;

  const std::uint32_t number_;
  const EpochState& epoch_;
  const Planted& planted_;
  Stats stats_;
  Ns now_ = 0;  // as of the last call that said it: for times that only people look at
  FlushList flush_;
  const LinkContext context_;
  std::map<Link::Key, Link> links_;
  std::vector<Place> lanes_;  // by connection; they are few
  std::size_t shared_lanes_ = 0;
  std::vector<LaneInfo> new_lanes_;
  std::vector<ConnId> closing_;
  std::vector<Report> reports_;
  bool has_wide_report_ = false;
  std::atomic<bool> meshed_{false};

  std::unordered_map<std::uint64_t, TagState> tags_;
  std::uint32_t first_sequence_ = 0;
  std::vector<PartPtr> running_;     // in the order they were called
  std::size_t filling_ = 0;          // of these, whose blocks are not all filled
  std::size_t largest_segment_ = 0;  // of an op of this epoch
  struct EarlyBytes {
    std::size_t sent = 0;      // to a member that is not known to have called their op
    std::size_t received = 0;  // from one that has not received Ready of this peer
    std::size_t stashed = 0;   // of these, for ops that this peer has not called
  };
  std::vector<EarlyBytes> early_;  // by side
};

}  // namespace ringfold
