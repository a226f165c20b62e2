// The engine without I/O: bytes and `now` in, bytes and events out.
//
// It knows four kinds of connection. A *handshake* connection delivers one message at a time and then holds, so that
// nothing behind the message is parsed before the role of the connection is decided. The *control* connection to the
// master carries messages for Python, and heartbeats and evidence that are handled here. A *lane* carries frames
// between neighbours of the ring. A *bulk* connection carries messages for Python, blocks of shared state, and filler
// for measurements.
//
// Epochs: an op runs in the installed epoch. After seal() no Done leaves and no evidence counts, until settle() has
// decided every op and install() begins the next epoch, in which retryable ops start again. A lane announces an epoch
// with a mark; frames of older epochs are drained, and a lane is not read beyond the mark of an epoch that is not
// installed here yet.
//
// Commit: an op is finished with success when Done of every member has been received (evidence), or by a verdict.
// core.cpp moves bytes and frames, core_ops.cpp handles the frames of ops, core_epochs.cpp seals, settles and installs,
// core_time.cpp sends heartbeats and checks deadlines, core_bulk.cpp carries blocks and filler, core_lanes.cpp shares a
// link's work among several lanes, core_choice.cpp decides which of them takes the next segment.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ringfold/frame.hpp"
#include "ringfold/op.hpp"
#include "ringfold/planted.hpp"

namespace ringfold {

using OpPtr = std::shared_ptr<Op>;
using Bytes = std::vector<std::byte>;

inline Bytes raw(const Descriptor& descriptor) {
  const auto* at = reinterpret_cast<const std::byte*>(&descriptor);
  return {at, at + sizeof descriptor};
}

struct Event {
  enum class Kind {
    opened,
    accepted,
    message,
    closed,
    link_lost,
    mismatch,
    op_timeout,
    op_cancelled,
    silent,
    blocks,
    sample,
    wake
  };
  Kind kind = Kind::wake;
  ConnId conn = 0;
  PeerId peer = 0;
  bool outgoing = false;
  std::uint32_t epoch = 0;  // mismatch, op_timeout, op_cancelled: in which the op ran
  std::uint64_t tag = 0;
  std::uint32_t sequence = 0;
  std::uint64_t milliseconds = 0;
  std::uint64_t batch = 0;  // blocks: the caller's number, and the indices of those with another hash
  std::vector<std::uint32_t> bad{};
  Ns elapsed = 0;  // sample: since the first filler; `bytes` of it had come by `counted`
  Ns counted = 0;
  std::uint64_t bytes = 0;
  std::string text{};
  Bytes body{};
  Bytes other{};
};

struct SealedOp {
  std::uint64_t tag;
  std::uint32_t sequence;
  int state;  // 0 unfinished, 1 done, 2 committed
  std::uint64_t registrations;
  std::optional<Payloads> payloads;
  Descriptor descriptor;
};

struct Verdict {
  std::uint64_t tag;
  std::uint32_t sequence;
  std::uint32_t fingerprint;  // of the op's descriptor
  bool commit;
  std::uint64_t registrations;
  std::optional<Payloads> payloads;
  int final;  // 0: tried again where it is retryable; 1: over
  Bytes reason;
};

// A call as every member knows it, whatever its sequence was in an epoch.
using CallName = std::tuple<std::uint64_t, std::uint64_t, std::uint32_t>;  // tag, step, call

struct EpochSpec {
  std::uint32_t epoch = 0;
  std::uint32_t rank = 0;
  std::uint32_t size = 0;
  std::vector<PeerId> members;
  bool evidence_by_master = false;
  std::size_t small_bytes = 0;
  std::size_t segment_bytes = 0;
  std::uint32_t peers_here = 1;  // members on this host
  bool multipath = false;        // some link has several lanes: ops are cut finely
};

struct LaneInfo {
  ConnId conn;
  bool outgoing;
  PeerId peer;
  std::uint32_t lane;
  bool shared = false;
  std::uint32_t paths = 1;
};

// How a lane stands to the others of its link.
struct Sharing {
  bool shared = false;  // the link is to have several lanes: one that is lost costs nothing but time
  std::uint32_t path = 0;
  std::uint32_t paths = 1;
  std::uint32_t epoch = 0;  // if this one is installed already, the lane joins it late and is marked at once
};

// Advice about the paths to one neighbour, looked at before each segment. Without shares and flags lanes just pull.
//   weight  a path's share counts for the first few segments of an op; then a path that can take more takes more
//   fixed   the shares bind: paths carry them in bytes, over every transfer, and the slowest for its share sets the
//   pace veto    a path gets nothing while another one can be counted on
struct PathShares {
  static constexpr std::uint32_t fixed = 1u << 16;  // below it: one veto bit per path
  std::array<std::uint16_t, max_paths> share{};
  std::uint32_t flags = 0;
};

// The round-trip time of a path: smoothed, and its minimum (0: unknown). What exceeds the minimum is time in queues, or
// a delayed acknowledgement.
struct Rtt {
  Ns smoothed = 0, min = 0;
};

// Where advice comes from, if not from set_path_shares(). It is read under the engine's mutex before each segment, so
// it must neither block nor throw. False: there is no advice now.
class PathHints {
 public:
  virtual ~PathHints() = default;
  virtual bool read(PeerId peer, PathShares& out) const = 0;
};

// One block of shared state: memory of the caller's, and the hash that its content should have.
struct Block {
  std::byte* at = nullptr;
  std::size_t bytes = 0;
  std::optional<std::uint64_t> hash{};
};

// Keeps the memory behind blocks alive. Any thread may release it, under the engine's mutex.
using MemoryOwner = std::shared_ptr<void>;

// The indices of the blocks whose present content does not have its expected hash.
std::vector<std::uint32_t> differing(const std::vector<Block>& blocks);

struct Stats {
  std::uint64_t committed = 0, aborted = 0, restarted = 0;
  std::uint64_t sent_bytes = 0, received_bytes = 0;
  std::uint64_t duplicates = 0, drained = 0;
  std::uint64_t reissued = 0, lanes_lost = 0;
  std::uint64_t lane_violations = 0;  // links that were dropped because a neighbour broke the protocol
};

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
  std::vector<LaneInfo> lanes() const;
  std::vector<ConnId> take_closing();

  // Bytes. `receive_space` is empty while the connection must not be read. `gather` fills iovecs with what may be sent.
  std::span<std::byte> receive_space(ConnId conn);
  void received(Ns now, ConnId conn, std::size_t bytes);
  std::size_t gather(ConnId conn, iovec* out, std::size_t most);
  void sent(Ns now, ConnId conn, std::size_t bytes);
  std::vector<ConnId> take_dirty();
  bool has_dirty() const { return !dirty_.empty(); }
  void touch(ConnId conn);
  // What the transport reports about a lane: bytes that the peer's kernel has not acknowledged, the smoothed RTT, and
  // the minimum RTT (0: unknown).
  void acknowledged(Ns now, ConnId conn, std::uint64_t unacknowledged, Ns rtt = 0, Ns min_rtt = 0);

  // Lanes that were promoted since the last call.
  std::vector<LaneInfo> take_new_lanes() { return std::exchange(new_lanes_, {}); }
  // Shared links: whether a lane of one has bytes in flight.
  bool shared_in_flight() const;
  // How many bytes the kernel should hold unsent for a lane among several: enough for as long as this thread may not
  // get a core, and no more, because they cannot be given to another lane. 0: as many as it likes.
  std::size_t unsent_wanted(ConnId conn) const;
  bool has_shared() const { return shared_lanes_ > 0; }
  Ns dead_after() const { return dead_after_; }
  void set_path_shares(PeerId peer, const PathShares& shares);
  void set_path_hints(const PathHints* hints) { hints_ = hints; }
  // The advice of the hints is another one: lanes that it held back look again.
  void advice_changed();
  // Bytes per second that were acknowledged on each path to a peer while some were in flight; 0: none in the last
  // second.
  std::array<std::uint64_t, max_paths> path_rates(Ns now, PeerId peer) const;
  // The RTT on each path to a peer, over the lanes of both links to it; zeros: none was measured in the last second.
  std::array<Rtt, max_paths> path_rtts(Ns now, PeerId peer) const;
  // Bytes of payload assigned to each path of the link to the next (or previous) peer since the epoch began; what
  // another path took over is counted there.
  std::array<std::uint64_t, max_paths> path_bytes(bool to_next) const { return path_bytes_[to_next]; }
  // The control connection, if its last echo is overdue (0 otherwise): are its bytes acknowledged, at least?
  ConnId late_echo(Ns now) const { return control_ != 0 && now - last_echoed_ > 2 * heartbeat_ ? control_ : 0; }

  // Bulk connections. Commands for a connection that is closed are ignored; std::invalid_argument if it is no bulk
  // connection, and for blocks that cannot be sent. The memory is read or written until the blocks are through, or the
  // connection is closed or lost, and never after that.
  void make_bulk(Ns now, ConnId conn);
  void send_blocks(Ns now, ConnId conn, const std::vector<Block>& blocks, const MemoryOwner& keep);
  void expect_blocks(ConnId conn, std::uint64_t batch, std::vector<Block> blocks, MemoryOwner keep);
  void fill(ConnId conn, bool on);
  void sample(Ns now, ConnId conn, Ns every);
  bool is_bulk(ConnId conn) const;
  std::vector<ConnId> take_filling();
  void forget_blocks();

  // Epochs.
  void set_registrations(std::uint64_t count) { registrations_ = count; }
  // Where the ops of each tag begin to count, the same with all peers. For tests, which begin shortly before it wraps.
  void set_first_sequence(std::uint32_t first) { first_sequence_ = first; }
  std::vector<SealedOp> seal(std::uint32_t epoch);
  void settle(Ns now, std::uint32_t epoch, const std::vector<Verdict>& verdicts, const Bytes& default_reason);
  void install(Ns now, EpochSpec spec);
  std::vector<std::pair<std::uint64_t, std::uint32_t>> progress() const;
  void fail_all(OpStatus status, Bytes reason);

  // Accepted connections that have not become anything yet.
  std::size_t unauthenticated() const;

  // The program begins this step, or is outside of any (`no_step`): calls are counted from 0 again.
  void set_step(std::uint64_t step);
  // A member was admitted that has made no call: all members count from 0 again. No op is in flight then.
  void restart_calls();
  // This call fails, also if it has not been made here yet.
  void refuse(const CallName& name, Bytes reason);
  // Ops. Throws std::invalid_argument when the tag is in flight.
  std::uint64_t submit(Ns now, OpSpec spec);
  OpPtr find(std::uint64_t id) const;
  bool cancel(std::uint64_t id);
  void release(std::uint64_t id);
  // Whether payload may come on a lane; between two peers one direction of each lane is nearly silent.
  bool expects(ConnId conn) const;
  std::uint32_t peers_here() const { return spec_.peers_here; }
  bool multipath() const { return spec_.multipath; }
  bool any_in_flight() const { return !running_.empty() || !waiting_.empty(); }
  std::vector<std::uint64_t> tags_in_flight() const;
  std::uint64_t finished_count() const { return finished_count_; }

  void tick(Ns now);
  Ns next_deadline() const;
  std::optional<Event> next_event();
  void push_event(Event event) { events_.push_back(std::move(event)); }
  bool has_events() const { return !events_.empty(); }
  const Stats& stats() const { return stats_; }

 private:
  enum class Role : std::uint8_t { handshake, control, lane, bulk };
  struct Conn;

  // A frame to be sent: 64 bytes of lane header (or none), then a segment of an op, or bytes of its own and after them
  // bytes that it borrows (a block of the caller's memory, or filler).
  struct OutFrame {
    FrameHeader header;
    bool has_header = false;
    bool filler = false;
    Payload owned;
    std::span<const std::byte> borrowed;
    MemoryOwner keep;
    OpPtr op;
    Sendable item;
    bool copied = false;   // the segment is in `owned`, not in the op's memory
    bool again = false;    // as of a flight
    bool is_copy = false;  // another lane had it before
    std::size_t sent = 0;
    std::size_t total = 0;
  };

  // A frame that a shared lane has sent and the other side has not reported as applied.
  struct Flight {
    FrameHeader header;
    Payload owned;
    OpPtr op;
    Sendable item;
    std::uint64_t end = 0;  // bytes that the lane had sent with it
    bool again = false;     // another lane sends a copy of it
    bool is_copy = false;
  };
  struct Tail {
    Conn* lane = nullptr;
    std::size_t at = 0;  // in its `tx` or its `flights`
    bool is_queued = false;
  };

  struct Batch {
    std::uint64_t number;
    std::vector<Block> blocks;
    MemoryOwner keep;
    std::size_t next = 0;
    std::vector<std::uint32_t> bad{};
  };

  // What a bulk connection is in the middle of. Inside a block or filler, nothing is left in the connection's `rx`.
  struct Bulk {
    std::deque<Batch> batches;      // expected, in this order
    bool in_block = false;          // the head of the next block's frame has been read
    std::size_t filled = 0;         // bytes of that block that are in its memory
    std::size_t filler_left = 0;    // of the filler frame at hand
    std::size_t queued_blocks = 0;  // bytes of blocks in `tx`
    bool fill = false;
    bool filler_seen = false;
    Ns filler_since = 0;
    std::uint64_t filler_bytes = 0;  // read
    std::uint64_t counted = 0;       // `filler_bytes` when nothing was left to read, and when that was
    Ns counted_at = 0;
    bool is_recounted = false;  // since the last sample
    Ns sample_every = 0, next_sample = 0, behind_since = 0;
  };

  struct Conn {
    ConnId id = 0;
    Role role = Role::handshake;
    bool accepted = false;
    bool held = false;
    bool closing = false;
    bool dirty = false;
    Ns closing_since = 0;
    std::string remote;
    std::uint64_t received_total = 0;
    Bytes rx;
    std::size_t rx_begin = 0, rx_end = 0;
    std::size_t offered = 0;  // how much could be read at once
    std::deque<OutFrame> tx;
    std::size_t tx_bytes = 0;
    // Lanes:
    bool outgoing = false;
    PeerId peer = 0;
    std::uint32_t lane = 0;
    std::uint32_t mark_sent = 0;
    std::uint32_t mark_seen = 0;
    Ns last_received = 0;
    Ns last_acknowledged = 0;
    std::uint64_t sent_total = 0;
    std::uint64_t acknowledged_total = 0;
    std::uint64_t unacknowledged = 0;
    Bulk bulk;
    // Lanes of shared links:
    Sharing sharing;
    std::deque<Flight> flights;
    std::uint64_t confirmed = 0;     // frames of this lane before the first of `flights`
    std::uint64_t frames_seen = 0;   // received, without `applied`
    std::uint64_t frames_acked = 0;  // of those, reported
    std::size_t bytes_unacked = 0;
    double rate = 0;  // of acknowledged bytes, per nanosecond, while some were in flight
    Ns rtt = 0, min_rtt = 0;
    Ns rtt_sampled_at = 0;   // when the transport last reported it
    Ns saturated_since = 0;  // since when so much is in flight that it is acknowledged at once
    Ns looked_at = 0;        // when the transport was last queried
    Ns busy_since = 0;       // where the present stretch of that began, and what was acknowledged then
    std::uint64_t busy_from = 0;
    bool awaits_first = false;           // it began from nothing, and nothing has been acknowledged since
    bool ran_dry = false;                // there was a moment without anything to send in it
    Ns measured = 0;                     // when `rate` was last looked at
    double busy_bytes = 0, busy_ns = 0;  // the same over about the last second of such time, for the agent
  };

  struct Stashed {
    bool from_next;
    FrameHeader header;
    Bytes payload;
  };

  struct TagState {
    std::uint32_t next = 0;
    OpPtr running{};
    bool called = false;  // here; otherwise only neighbours have
    // An op was cancelled here that the neighbours still wait for: the next one runs in the next epoch.
    bool cancelled = false;
    bool has_committed = false;
    std::uint32_t committed = 0;
    Descriptor committed_descriptor{};
    std::uint64_t committed_registrations = 0;
    std::optional<Payloads> committed_payloads{};
    std::vector<Stashed> stash{};
    std::size_t stash_bytes = 0;
    std::size_t stashed_segments[2] = {};  // of these, the payload of segments, by direction
  };

  // core.cpp: bytes and frames
  Conn* find_conn(ConnId id);
  const Conn* find_conn(ConnId id) const;
  void mark_dirty(Conn& conn);
  void process(Ns now, Conn& conn);
  bool process_control(Ns now, Conn& conn);
  bool process_lane(Ns now, Conn& conn);
  void compact(Conn& conn, std::size_t needed);
  void violation(Ns now, Conn& conn, std::string reason);
  void control_frame(Conn& conn, ControlFrame kind, const std::byte* body, std::size_t bytes);
  void lane_frame(Conn& conn, FrameHeader header, Payload payload);
  void drop_lane(Conn& conn, std::string reason);
  void drop_link(Conn& conn, std::string reason);
  void mark(Conn& conn);
  void pull(Conn& conn);
  static void own_many_pieces(OutFrame& frame);
  OpPtr next_op_to_send(bool to_next) const;
  void mark_dirty_for(const OpPtr& op);
  std::size_t frame_limit() const;
  std::size_t early_limit() const;

  // core_lanes.cpp: several lanes share a link's work
  static bool same_link(const Conn& a, const Conn& b);
  bool has_sibling(const Conn& conn) const;
  static void note_sent(Conn& conn, OutFrame& frame, std::uint64_t end);
  static void measure(Conn& conn, Ns now, std::uint64_t acknowledged);
  static void note_rate(Conn& conn, Ns now, std::uint64_t acknowledged);
  static bool has_too_much_unreported(const Conn& conn);
  void report_applied(Conn& conn);
  bool on_applied(Conn& conn, std::uint64_t count, std::string& why);
  void send_elsewhere(Conn& lost);
  void requeue(bool outgoing, const FrameHeader& header, const OpPtr& op, const Sendable& item, const Payload& owned);
  void copy_segment(OutFrame& frame) const;
  bool worth_sending(const FrameHeader& header, const OpPtr& op, const Sendable& item) const;
  static Ns stalled(const Conn& conn);
  static Ns silent(const Conn& conn);
  static constexpr Ns no_longer_counted_on = 20'000'000;  // after so long without an acknowledgement that is due
  static void note_saturation(Conn& conn, Ns now, std::size_t more);
  static Ns time_for(double bytes, double rate);
  Ns arrives_in(const Conn& conn, std::size_t bytes) const;
  static Ns overdue_by(const Conn& conn, std::uint64_t end, bool is_copy);
  Tail find_tail(const Conn& idle);
  bool reissue(Conn& idle);

  // core_choice.cpp: which of them takes what
  Conn* lane_for_control(bool outgoing);
  bool may_take(const Conn& conn, const OpPtr& op) const;
  bool leave_to_others(const Conn& conn, const OpPtr& op);
  bool too_late(const Conn& conn, const OpPtr& op) const;
  double presumed_rate(const Conn& conn) const;
  bool is_measured(const Conn& conn) const;
  bool too_late_by_shares(const Conn& conn, const OpPtr& op, const PathShares& advice) const;
  bool is_advised(const Conn& conn, const OpPtr& op) const;
  bool is_fixed(const Conn& conn) const;
  bool may_take_fixed(const Conn& conn, const OpPtr& op) const;
  bool is_within_share(const Conn& conn, std::size_t next, std::size_t segment, const PathShares& advice) const;
  double credit(bool outgoing, const PathShares& advice, std::size_t path) const;
  void charge(const Conn& conn, double bytes);
  void forgive_credits();
  bool advice_for(const Conn& conn, PathShares& advice) const;
  std::array<bool, max_paths> usable_paths(const Conn& conn, const PathShares& advice) const;
  bool is_vetoed(const Conn& conn) const;
  void count_assigned(Conn& conn, const OpPtr& op, std::size_t bytes);
  void count_taken_over(const Conn& slow, const Conn& idle, std::size_t bytes, bool is_moved);

  // core_bulk.cpp
  Conn* find_bulk(ConnId id);
  bool process_bulk(Ns now, Conn& conn);
  bool bulk_head(Ns now, Conn& conn);
  void block_is_in(Conn& conn);
  void count_filler(Ns now, Conn& conn, std::size_t bytes);
  void count_is_whole(Ns now, Bulk& bulk);
  void take_sample(Ns now, Conn& conn);
  std::size_t bulk_read_bytes(const Conn& conn) const;
  void queue(Conn& conn, OutFrame frame);
  void pull_filler(Conn& conn);
  void drop_filler(Conn& conn);
  void drop_blocks(Conn& conn);

  // core_time.cpp
  void beat(Ns now);
  std::uint64_t stalled_ms(Ns now, bool outgoing) const;
  std::uint64_t in_starved_ms(Ns now) const;

  // core_ops.cpp: ops and evidence
  bool on_lane_frame(Conn& conn, const FrameHeader& header, const std::byte* payload, std::string& why);
  bool on_op_frame(const OpPtr& op, bool from_next, const FrameHeader& header, const std::byte* payload,
                   std::string& why);
  bool on_data(const OpPtr& op, bool from_next, const FrameHeader& header, const std::byte* payload, std::string& why);
  struct Journey {
    std::uint32_t travelled, reach;  // in hops
  };
  Journey journey(std::uint32_t origin, bool from_next) const;
  bool on_absent(const OpPtr& op, bool from_next, const FrameHeader& header, std::string& why);
  void send_absent(const OpPtr& op, bool to_next, std::uint32_t origin);
  bool on_done(const OpPtr& op, bool from_next, const FrameHeader& header, const std::byte* payload, std::string& why);
  bool on_evidence(const std::byte* body, std::size_t bytes, std::string& why);
  bool stash(TagState& tag, Conn& conn, const FrameHeader& header, const std::byte* payload, std::string& why);
  void start(Ns now, const OpPtr& op);
  void send_ready(const OpPtr& op, bool to_next);
  void on_early_bytes(bool from_next, std::size_t bytes);
  void on_neighbour_called(const OpPtr& op, bool next);
  void release_early(const OpPtr& op, bool to_next);
  void local_part_done(const OpPtr& op);
  void send_done(const OpPtr& op, bool to_next, std::uint32_t origin, std::uint64_t registrations);
  void send_done_to_master(const OpPtr& op);
  void check_evidence(const OpPtr& op);
  void commit(const OpPtr& op);
  void finish(const OpPtr& op, OpStatus status, Bytes reason);
  void detach(const OpPtr& op);
  void undo(const OpPtr& op);
  void uncount(const OpPtr& op);
  FrameHeader header_for(const OpPtr& op, LaneFrame kind) const;
  PeerId next_peer() const { return spec_.members[(spec_.rank + 1) % spec_.size]; }
  PeerId previous_peer() const { return spec_.members[(spec_.rank + spec_.size - 1) % spec_.size]; }

#ifdef RINGFOLD_PLANTED
  Planted planted_;
#else
  static constexpr Planted planted_{};
#endif
  Stats stats_;
  std::map<ConnId, Conn> conns_;
  ConnId next_conn_ = 1;
  std::vector<ConnId> dirty_;
  std::vector<ConnId> closing_;
  std::vector<LaneInfo> new_lanes_;
  std::size_t shared_lanes_ = 0;
  std::map<PeerId, PathShares> shares_;
  const PathHints* hints_ = nullptr;
  std::array<std::uint64_t, max_paths> path_bytes_[2] = {};
  // Fixed shares, by direction: what each path is behind its share, in bytes, and the shares that this counts for.
  std::array<double, max_paths> credits_[2] = {};
  std::array<std::uint16_t, max_paths> credited_shares_[2] = {};
  std::size_t largest_segment_ = 0;  // of an op of this epoch
  std::vector<ConnId> filling_;      // bulk connections that began to fill since the last take_filling
  std::deque<Event> events_;

  ConnId control_ = 0;
  Ns heartbeat_ = 0, dead_after_ = 0, next_heartbeat_ = 0, last_received_ = 0, last_echoed_ = 0, last_tick_ = 0;
  std::uint64_t heartbeat_number_ = 0, received_number_ = 0, echoed_number_ = 0;
  bool silence_reported_ = false;

  EpochSpec spec_;  // of the installed epoch; epoch 0: none yet
  bool sealed_ = true;
  std::uint64_t registrations_ = 0;
  Ns now_ = 0;                       // of the bytes or the command at hand
  std::uint64_t best_out_rate_ = 0;  // of the ops that ended since the last beat, in bytes per second
  std::unordered_map<std::uint64_t, TagState> tags_;
  TagState& tag_state(std::uint64_t tag) {
    return tags_.try_emplace(tag, TagState{.next = first_sequence_}).first->second;
  }
  void forget_tags();
  std::uint32_t first_sequence_ = 0;
  std::size_t called_tags_ = 0;
  // Early segments, by direction; see early_limit().
  std::size_t early_sent_[2] = {};        // to a neighbour that is not known to have called their op
  std::size_t early_received_[2] = {};    // from one that has not received Ready of this peer
  std::size_t stashed_segments_[2] = {};  // of these, for ops that this peer has not called
  std::uint64_t step_ = no_step;
  // By tag: how many calls were made in this step, or since an admission.
  std::unordered_map<std::uint64_t, std::uint32_t> calls_;
  struct RefusedCall {
    std::uint32_t epoch;  // in which it was decided
    Bytes reason;
  };
  std::map<CallName, RefusedCall> refused_;  // calls that will fail when they are made here
  BackupPool pool_;
  std::uint64_t next_op_ = 1;
  std::unordered_map<std::uint64_t, OpPtr> ops_;
  std::vector<OpPtr> running_;  // in the order they were called
  std::vector<OpPtr> waiting_;
  std::uint64_t finished_count_ = 0;
  bool over_ = false;
  OpStatus over_status_ = OpStatus::failed;
  Bytes over_reason_;
};

}  // namespace ringfold
