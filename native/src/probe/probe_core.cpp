#include <algorithm>
#include <numeric>
#include <utility>

#include "ringfold/probe.hpp"

namespace ringfold::probe {
namespace {

constexpr Ns millisecond = 1'000'000;
constexpr Ns answer_timeout = 1'000 * millisecond;  // then an exchange is lost
constexpr Ns second_timeout = 20 * millisecond;     // after Pt1: then Pt2 will not come, and the answer goes without
constexpr Ns stamp_timeout = 100 * millisecond;     // after Pr2: then its stamp will not come
constexpr Ns stepped_for = 100 * millisecond;       // or four cycles: a packet or two may get lost
constexpr Ns early_enough = 2'000;                  // the timer counts by a clock that is a little different
constexpr std::size_t max_answers = 256;            // of one neighbour at a time: a second, at the default cadence
constexpr std::size_t max_rows = 1 << 16;           // of one edge, if it is not rotated
constexpr std::uint64_t late_by = 8;                // behind a complete exchange: at a rotation, this many mean lost

enum Column { t1_tx, t1_rx, t2_tx, t2_rx, r1_tx, r1_rx, r2_tx, r2_rx };

bool has_forward(const Row& row) { return row[t1_tx] != 0 && row[t1_rx] != 0 && row[t2_tx] != 0 && row[t2_rx] != 0; }

bool has_backward(const Row& row) { return row[r1_tx] != 0 && row[r1_rx] != 0 && row[r2_tx] != 0 && row[r2_rx] != 0; }

// In the order of sending; they mostly are.
std::vector<Row> by_sequence(std::vector<Row> rows, const std::vector<std::uint64_t>& sequences) {
  if (std::is_sorted(sequences.begin(), sequences.end())) return rows;
  std::vector<std::size_t> order(rows.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return sequences[a] < sequences[b]; });
  std::vector<Row> sorted;
  sorted.reserve(rows.size());
  for (const std::size_t each : order) sorted.push_back(rows[each]);
  return sorted;
}

template <typename Edges>
auto find_edge(Edges& edges, Node node) {
  return std::find_if(edges.begin(), edges.end(), [&](const auto& each) { return each.link.node == node; });
}

}  // namespace

bool Core::Heard::accept(std::uint64_t sequence) {
  if (sequence > newest_) {
    if (sequence - newest_ >= span) {
      seen_.reset();
    } else {
      for (std::uint64_t each = newest_ + 1; each < sequence; ++each) seen_.reset(each % span);
    }
    newest_ = sequence;
  } else if (newest_ - sequence >= span || seen_.test(sequence % span)) {
    return false;
  }
  seen_.set(sequence % span);
  return true;
}

// Commands

void Core::configure(Ns node_now, const Key& key, const std::vector<Link>& out, const std::vector<Link>& into) {
  const bool same_key = has_key_ && key == key_;
  std::vector<InEdge> before = std::move(in_);
  key_ = key;
  has_key_ = true;
  ++generation_;
  out_.clear();
  in_.clear();
  for (const Link& link : out) out_.push_back({.link = link});
  for (const Link& link : into) {
    InEdge edge{.link = link};
    const auto known = find_edge(before, link.node);
    if (same_key && known != before.end()) {
      edge.first = known->first;
      edge.second = known->second;
    }
    in_.push_back(std::move(edge));
  }
  begin_window(node_now);
}

void Core::resume(Ns now, Ns node_now, Ns gap, Ns pause) {
  gap_ = gap;
  pause_ = pause;
  if (!probing_) {  // the neighbours' answers wait for the next first instant
    probing_ = true;
    at_second_ = false;
    next_ = cycle_ = now;
    ticking_ = true;
  }
  begin_window(node_now);
}

void Core::pause() {
  probing_ = false;
  for (OutEdge& edge : out_) {  // the other half of the last exchange is not sent any more: that is no loss
    if (!edge.exchanges.empty() && !edge.exchanges.back().has_second) edge.exchanges.back().fate = Fate::dropped;
  }
}

void Core::begin_window(Ns node_now) {
  window_begin_ = node_now;
  window_stepped_.clear();
  for (OutEdge& edge : out_) {
    for (Exchange& each : edge.exchanges) {
      if (each.fate == Fate::open) each.fate = Fate::dropped;
    }
    edge.rows.clear();
    edge.sequences.clear();
    edge.sent = edge.lost = edge.duplicates = 0;
    edge.user_stamps = edge.stepped = false;
  }
}

std::vector<Window> Core::peek(Ns node_now, std::size_t most) const {
  std::vector<Window> windows;
  for (const OutEdge& edge : out_) {
    Window window{.src = me_, .dst = edge.link.node, .begin = window_begin_, .end = node_now};
    const std::size_t count = std::min(most, edge.rows.size());
    window.rows.assign(edge.rows.end() - static_cast<std::ptrdiff_t>(count), edge.rows.end());
    window.kept.assign(count, 0);
    windows.push_back(std::move(window));
  }
  return windows;
}

Window Core::closed(Ns node_now, const OutEdge& edge, std::vector<Row> rows) const {
  Window window{.src = me_, .dst = edge.link.node, .begin = window_begin_, .end = node_now};
  window.rows = by_sequence(std::move(rows), edge.sequences);
  window.sent = edge.sent;
  window.lost = edge.lost;
  window.duplicates = edge.duplicates;
  window.user_stamps = user_stamps_ || edge.user_stamps;
  window.stepped = window_stepped_;
  if (edge.stepped)
    window.stepped += (window.stepped.empty() ? "" : "; ") + std::string("the clock of node ") +
                      std::to_string(edge.link.node) + "'s host stepped";
  return window;
}

std::vector<Window> Core::so_far(Ns node_now) const {
  std::vector<Window> windows;
  windows.reserve(out_.size());
  for (const OutEdge& edge : out_) windows.push_back(closed(node_now, edge, edge.rows));
  return windows;
}

std::vector<Window> Core::rotate(Ns now, Ns node_now) {
  std::vector<Window> windows;
  windows.reserve(out_.size());
  for (OutEdge& edge : out_) {
    expire(now, edge);
    // What is long overtaken is lost, though its time is not over: a window would miss the losses of its last second.
    for (std::size_t i = 0; i < edge.exchanges.size(); ++i) {
      const std::uint64_t sequence = edge.first + i;
      if (sequence + late_by > edge.newest_complete) break;
      if (edge.exchanges[i].fate == Fate::open) decide(edge, sequence, edge.exchanges[i], Fate::lost);
    }
    windows.push_back(closed(node_now, edge, std::move(edge.rows)));
  }
  begin_window(node_now);
  return windows;
}

void Core::stepped(Ns now, const std::string& what) {
  window_stepped_ += (window_stepped_.empty() ? "" : "; ") + what;
  if (window_stepped_.size() > 200) window_stepped_.resize(200);
  stepped_until_ = now + std::max(stepped_for, 4 * (gap_ + pause_));
}

std::size_t Core::in_flight() const {
  std::size_t count = 0;
  for (const OutEdge& edge : out_) {
    count += static_cast<std::size_t>(std::count_if(edge.exchanges.begin(), edge.exchanges.end(),
                                                    [](const Exchange& each) { return each.fate == Fate::open; }));
  }
  for (const InEdge& edge : in_) count += edge.answers.size();
  return count;
}

// What comes

void Core::received(Ns now, std::span<const std::uint8_t> bytes, const Endpoint& from, Ns stamp) {
  ++stats_.received;
  Packet packet;
  switch (decode(key_, bytes, packet)) {
    case Reading::malformed:
      ++stats_.malformed;
      return;
    case Reading::spoofed:
      ++stats_.spoofed;
      return;
    case Reading::good:
      break;
  }
  if (!has_key_) {  // a tag under no key proves nothing
    ++stats_.spoofed;
    return;
  }
  const bool asks = packet.kind == Kind::pt1 || packet.kind == Kind::pt2;
  const auto asking = asks ? find_edge(in_, packet.src) : in_.end();
  const auto answering = asks ? out_.end() : find_edge(out_, packet.src);
  if (packet.dst != me_ || (asking == in_.end() && answering == out_.end())) {
    ++stats_.strangers;
    return;
  }
  if (stamp == 0) ++stats_.unstamped;
  if (asks) {
    probe_came(now, *asking, packet, from, stamp);
  } else {
    answer_came(*answering, packet, stamp);
  }
}

void Core::probe_came(Ns now, InEdge& edge, const Packet& packet, const Endpoint& from, Ns stamp) {
  const bool is_first = packet.kind == Kind::pt1;
  auto answer = std::find_if(edge.answers.begin(), edge.answers.end(),
                             [&](const Answer& each) { return each.sequence == packet.sequence; });
  if (!(is_first ? edge.first : edge.second).accept(packet.sequence)) {
    ++(answer == edge.answers.end() ? stats_.replayed : stats_.duplicates);
    return;
  }
  ++stats_.valid;
  if (stamp == 0) return;
  if (answer == edge.answers.end()) {
    if (edge.answers.size() >= max_answers) {
      ++stats_.refused;
      return;
    }
    answer = edge.answers.insert(answer, {.sequence = packet.sequence, .came = now});
  }
  answer->to = from;
  (is_first ? answer->has1 : answer->has2) = true;
  (is_first ? answer->t1_rx : answer->t2_rx) = stamp;
}

void Core::answer_came(OutEdge& edge, const Packet& packet, Ns stamp) {
  if (packet.sequence < edge.first || packet.sequence - edge.first >= edge.exchanges.size()) {
    ++stats_.replayed;
    return;
  }
  Exchange& exchange = edge.exchanges[packet.sequence - edge.first];
  const std::uint8_t bit = packet.kind == Kind::pr1 ? 1 : packet.kind == Kind::pr2 ? 2 : 4;
  if ((exchange.got & bit) != 0) {
    ++stats_.duplicates;
    ++edge.duplicates;
    return;
  }
  exchange.got |= bit;
  ++stats_.valid;
  if (exchange.fate != Fate::open) return;
  edge.user_stamps |= packet.user_stamps;
  edge.stepped |= packet.stepped;
  Row& row = exchange.row;
  switch (packet.kind) {
    case Kind::pr1:
      row[t1_rx] = packet.a;
      row[r1_rx] = stamp;
      break;
    case Kind::pr2:
      row[r1_tx] = packet.a;
      row[t2_rx] = packet.b;
      row[r2_rx] = stamp;
      break;
    default:
      row[r2_tx] = packet.a;
      if (row[r1_tx] == 0) row[r1_tx] = packet.b;
      break;
  }
  if (has_forward(row) && has_backward(row)) decide(edge, packet.sequence, exchange, Fate::complete);
}

void Core::stamped(const Owner& owner, Ns stamp) {
  ++stats_.tx_stamps;
  if (owner.generation != generation_ || stamp == 0) return;
  if (owner.kind == Kind::pt1 || owner.kind == Kind::pt2) {
    OutEdge& edge = out_[owner.link];
    if (owner.sequence < edge.first || owner.sequence - edge.first >= edge.exchanges.size()) return;
    Exchange& exchange = edge.exchanges[owner.sequence - edge.first];
    if (exchange.fate != Fate::open) return;
    exchange.row[owner.kind == Kind::pt1 ? t1_tx : t2_tx] = stamp;
    if (has_forward(exchange.row) && has_backward(exchange.row)) decide(edge, owner.sequence, exchange, Fate::complete);
    return;
  }
  for (Answer& each : in_[owner.link].answers) {
    if (each.sequence == owner.sequence) (owner.kind == Kind::pr1 ? each.r1_tx : each.r2_tx) = stamp;
  }
}

void Core::decide(OutEdge& edge, std::uint64_t sequence, Exchange& exchange, Fate fate) {
  exchange.fate = fate;
  ++edge.sent;
  if (fate == Fate::lost) ++edge.lost;
  if (fate == Fate::complete) {
    ++stats_.complete;
    edge.newest_complete = std::max(edge.newest_complete, sequence);
  }
  if (!has_forward(exchange.row) && !has_backward(exchange.row)) return;
  if (edge.rows.size() >= max_rows) {
    edge.rows.erase(edge.rows.begin(), edge.rows.begin() + max_rows / 2);
    edge.sequences.erase(edge.sequences.begin(), edge.sequences.begin() + max_rows / 2);
  }
  edge.rows.push_back(exchange.row);
  edge.sequences.push_back(sequence);
}

void Core::expire(Ns now, OutEdge& edge) {
  while (!edge.exchanges.empty() && now - edge.exchanges.front().begun >= answer_timeout) {
    if (edge.exchanges.front().fate == Fate::open) decide(edge, edge.first, edge.exchanges.front(), Fate::lost);
    edge.exchanges.pop_front();
    ++edge.first;
  }
}

// What goes

bool Core::is_busy() const {
  if (probing_ && !out_.empty()) return true;
  return std::any_of(in_.begin(), in_.end(), [](const InEdge& each) { return !each.answers.empty(); });
}

std::optional<Ns> Core::due() const {
  if (!is_busy()) return std::nullopt;
  return ticking_ ? next_ : 0;
}

void Core::step(Ns now, std::vector<Outgoing>& out) {
  if (!is_busy()) {
    ticking_ = false;
    return;
  }
  if (!ticking_) {  // only answering: Pt2 comes a gap after what has just come
    ticking_ = true;
    at_second_ = false;
    next_ = cycle_ = now + (probing_ ? 0 : gap_);
  }
  if (now + early_enough < next_) return;
  ++stats_.ticks;
  if (now - next_ > gap_ / 2) ++stats_.ticks_late;
  if (!at_second_) {
    first_instant(now, out);
    take_turns(out);
    next_ = now + gap_;
  } else {
    second_instant(now, out);
    take_turns(out);
    // A cycle that was late does not make the next one short: its answers need the time, too.
    cycle_ = std::max(cycle_ + gap_ + pause_, now + pause_ / 2);
    ++cycles_;
    next_ = cycle_;
  }
  at_second_ = !at_second_;
}

// The first packet of a batch finds cold caches and takes a few hundred nanoseconds longer. If it were always the same
// edge's, or always a probe and never an answer, that would be an asymmetry, which no estimator can see. So all take
// turns, in the same order at both instants of a cycle, for the spacing of pairs. Pd1 is not stamped and goes last.
void Core::take_turns(std::vector<Outgoing>& out) const {
  const auto end =
      std::stable_partition(out.begin(), out.end(), [](const Outgoing& each) { return each.wants_stamp(); });
  const auto count = static_cast<std::uint64_t>(end - out.begin());
  if (count > 1) std::rotate(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(cycles_ % count), end);
}

void Core::send(Ns now, std::vector<Outgoing>& out, Kind kind, std::size_t link, const Link& to, std::uint64_t sequence,
                Ns a, Ns b) {
  out.push_back({.packet = {.kind = kind,
                            .user_stamps = user_stamps_,
                            .stepped = now < stepped_until_,
                            .src = me_,
                            .dst = to.node,
                            .sequence = sequence,
                            .a = a,
                            .b = b},
                 .to = to.at,
                 .owner = {generation_, static_cast<std::uint32_t>(link), sequence, kind}});
}

void Core::first_instant(Ns now, std::vector<Outgoing>& out) {
  if (probing_ && !out_.empty()) {
    stats_.sequence = sequence_ = (sequence_ + 1) & sequence_mask;
    for (std::size_t i = 0; i < out_.size(); ++i) {
      OutEdge& edge = out_[i];
      expire(now, edge);
      if (edge.exchanges.empty()) edge.first = sequence_;
      edge.exchanges.push_back({.begun = now});
      send(now, out, Kind::pt1, i, edge.link, sequence_, 0, 0);
    }
  }
  for (std::size_t i = 0; i < in_.size(); ++i) {
    std::erase_if(in_[i].answers, [&](Answer& each) {
      const Link to{in_[i].link.node, each.to};
      switch (each.stage) {
        case Stage::waiting:
          if (each.has1 && (each.has2 || now - each.came >= second_timeout)) {
            send(now, out, Kind::pr1, i, to, each.sequence, each.t1_rx, 0);
            each.stage = Stage::first_sent;
            return false;
          }
          return now - each.came >= 2 * second_timeout;
        case Stage::first_sent:
          return false;
        case Stage::second_sent:
          if (each.r2_tx == 0) return now - each.sent >= stamp_timeout;
          send(now, out, Kind::pd1, i, to, each.sequence, each.r2_tx, each.r1_tx);
          return true;
      }
      return true;
    });
  }
}

void Core::second_instant(Ns now, std::vector<Outgoing>& out) {
  if (probing_) {
    for (std::size_t i = 0; i < out_.size(); ++i) {
      OutEdge& edge = out_[i];
      if (edge.exchanges.empty() || edge.exchanges.back().has_second) continue;
      Exchange& exchange = edge.exchanges.back();
      exchange.has_second = true;
      const std::uint64_t sequence = edge.first + edge.exchanges.size() - 1;
      send(now, out, Kind::pt2, i, edge.link, sequence, exchange.row[t1_tx], 0);
    }
  }
  for (std::size_t i = 0; i < in_.size(); ++i) {
    for (Answer& each : in_[i].answers) {
      if (each.stage != Stage::first_sent) continue;
      send(now, out, Kind::pr2, i, {in_[i].link.node, each.to}, each.sequence, each.r1_tx, each.t2_rx);
      each.stage = Stage::second_sent;
      each.sent = now;
    }
  }
}

}  // namespace ringfold::probe
