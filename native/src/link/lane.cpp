#include "ringfold/lane.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ringfold {
namespace {

constexpr std::size_t report_after_bytes = 128 * 1024;
constexpr std::uint64_t report_after_frames = 64;
// What a neighbour may have read without a report, or have in its kernel.
constexpr std::uint64_t max_unreported_bytes = std::uint64_t{1} << 30;
constexpr std::size_t max_unreported_frames = std::size_t{1} << 18;
constexpr Ns millisecond = 1'000'000;
constexpr Ns rate_over = 10 * millisecond;  // shorter stretches do not show a lane's rate
constexpr Ns unsent_for = 4 * millisecond;
constexpr std::size_t min_unsent = 16 * 1024, max_unsent = 1024 * 1024;
constexpr std::uint64_t acknowledged_at_once = 18'000;  // two packets, however large; less may wait for more to come,
constexpr Ns acknowledged_later = 50 * millisecond;     // and Linux waits 40 ms
constexpr double busy_window = 1e9;
constexpr Ns rate_is_new = 1000 * millisecond;  // older rates do not describe the paths now
constexpr double for_ever = 1e15;               // eleven days: so many nanoseconds can be added up without a thought

}  // namespace

OutFrame OutFrame::control(FrameHeader header, Payload payload) {
  header.length = static_cast<std::uint32_t>(payload.size());
  header.payload_crc = crc32c(payload.data(), payload.size());
  header.header_crc = header.crc();
  OutFrame frame;
  frame.header = header;
  frame.has_header = true;
  frame.total = sizeof header + payload.size();
  frame.owned = std::move(payload);
  return frame;
}

void OutFrame::copy_segment() {
  std::vector<Piece> pieces;
  part->pieces(item, pieces);
  Bytes copy;
  copy.reserve(item.travelling_bytes());
  for (const Piece& piece : pieces) copy.insert(copy.end(), piece.at, piece.at + piece.bytes);
  owned = std::move(copy);
  copied = true;
}

void LaneMeter::sent(Ns now, std::size_t bytes) {
  if (unacknowledged_ == 0) last_acknowledged_ = now;
  const std::uint64_t before = in_flight();
  if (before <= acknowledged_at_once && before + bytes > acknowledged_at_once) saturated_since_ = now;
  sent_total_ += bytes;
}

void LaneMeter::acknowledged(Ns now, std::uint64_t unacknowledged, Ns rtt, Ns min_rtt, bool has_more, bool is_shared) {
  const std::uint64_t total = sent_total_ - std::min(unacknowledged, sent_total_);
  if (is_shared) measure(now, total, has_more);
  if (total > acknowledged_total_) {
    acknowledged_total_ = total;
    last_acknowledged_ = now;
  }
  unacknowledged_ = unacknowledged;
  if (rtt > 0) {
    rtt_ = rtt;
    if (min_rtt > 0) min_rtt_ = min_rtt;
    else min_rtt_ = min_rtt_ > 0 ? std::min(min_rtt_, rtt) : rtt;
    rtt_sampled_at_ = now;
  }
  looked_at_ = now;
}

void LaneMeter::measure(Ns now, std::uint64_t acknowledged, bool has_more) {
  const bool busy = sent_total_ > acknowledged;
  const bool is_far = min_rtt_ >= rate_over;
  if (!has_more) ran_dry_ = true;
  if (is_far && awaits_first_ && busy) {
    if (acknowledged == busy_from_) return;
    awaits_first_ = ran_dry_ = false;
    busy_since_ = now;
    busy_from_ = acknowledged;
    return;
  }
  const Ns stretch = is_far ? min_rtt_ : rate_over;
  if (busy_since_ != 0 && now - busy_since_ >= stretch) {
    if (!is_far || !ran_dry_) note_rate(now, acknowledged);
    busy_since_ = 0;
    awaits_first_ = false;
  } else if (busy_since_ == 0) {
    awaits_first_ = true;
  }
  if (!busy) busy_since_ = 0;
  if (busy && busy_since_ == 0) {
    busy_since_ = now;
    busy_from_ = acknowledged;
    ran_dry_ = false;
  }
}

void LaneMeter::note_rate(Ns now, std::uint64_t acknowledged) {
  const auto took = static_cast<double>(now - busy_since_);
  const auto bytes = static_cast<double>(acknowledged - busy_from_);
  rate_ = rate_ > 0 ? (rate_ + bytes / took) / 2 : bytes / took;
  measured_ = now;
  const double keep = std::exp(-took / busy_window);
  busy_bytes_ = busy_bytes_ * keep + bytes;
  busy_ns_ = busy_ns_ * keep + took;
}

std::uint64_t LaneMeter::recent_rate(Ns now) const {
  if (rate_ <= 0 || measured_ == 0 || now - measured_ > rate_is_new) return 0;
  return static_cast<std::uint64_t>(busy_bytes_ / busy_ns_ * 1e9);
}

Rtt LaneMeter::recent_rtt(Ns now) const {
  if (rtt_sampled_at_ == 0 || now - rtt_sampled_at_ > rate_is_new) return {};
  return {rtt_, min_rtt_};
}

Ns LaneMeter::stalled() const {
  if (in_flight() == 0) return 0;
  return std::max<Ns>(looked_at_ - last_acknowledged_ - rtt_, 0);
}

Ns LaneMeter::silent() const {
  const Ns at_least = std::max<Ns>(stalled() - acknowledged_later, 0);
  if (in_flight() <= acknowledged_at_once) return at_least;
  return std::max(looked_at_ - std::max(last_acknowledged_, saturated_since_) - rtt_, at_least);
}

Ns LaneMeter::overdue_by(std::uint64_t end, bool is_copy) const {
  const auto left = static_cast<double>(end - std::min(end, acknowledged_total_));
  const Ns takes = rate_ > 0 ? time_for(left, rate_) : 0;
  return std::max(takes, is_copy ? silent() : stalled());
}

// The rate of a lane that was silent for a second is next to nothing, and what it would take is more than a number of
// nanoseconds can hold.
Ns LaneMeter::time_for(double bytes, double rate) { return static_cast<Ns>(std::min(bytes / rate, for_ever)); }

void Flights::note_sent(OutFrame& frame, std::uint64_t end) {
  if (frame.header.kind == LaneFrame::applied) return;
  Flight flight;
  flight.header = frame.header;
  flight.part = frame.part;
  flight.end = end;
  flight.again = frame.again;
  flight.is_copy = frame.is_copy;
  if (frame.header.kind == LaneFrame::data) flight.item = std::move(frame.item);
  else flight.owned = std::move(frame.owned);
  flights_.push_back(std::move(flight));
}

bool Flights::applied(std::uint64_t count) {
  if (count > sent()) return false;
  while (confirmed_ < count) {
    flights_.pop_front();
    ++confirmed_;
  }
  return true;
}

void Flights::forget() {
  confirmed_ += flights_.size();
  flights_.clear();
}

bool Flights::are_too_many(std::uint64_t sent_total) const {
  if (flights_.empty()) return false;
  return flights_.size() > max_unreported_frames || sent_total - flights_.front().end > max_unreported_bytes;
}

bool Flights::came(std::size_t bytes) {
  ++seen_;
  bytes_unreported_ += bytes;
  return bytes_unreported_ >= report_after_bytes || seen_ - reported_ >= report_after_frames;
}

std::uint64_t Flights::report() {
  reported_ = seen_;
  bytes_unreported_ = 0;
  return seen_;
}

Lane::Lane(Connection base, bool outgoing, PeerId peer, std::uint32_t number, Sharing how)
    : Connection(std::move(base)), outgoing(outgoing), peer(peer), number(number), sharing([&how] {
        how.path = std::min<std::uint32_t>(how.path, max_paths - 1);
        return how;
      }()) {}

void Lane::queue_control(FrameHeader header, Payload payload) {
  tx.push_before(OutFrame::control(header, std::move(payload)),
                 [](const OutFrame& queued) { return queued.part != nullptr; });
}

std::size_t Lane::unsent_wanted() const {
  if (!sharing.shared) return 0;
  const auto bytes = static_cast<std::size_t>(meter.rate() * static_cast<double>(unsent_for));
  return std::clamp(bytes, min_unsent, max_unsent);
}

void Lane::detach(const OpPart& part) {
  tx.erase_if([&](const OutFrame& frame) { return frame.part.get() == &part && frame.sent == 0; });
  for (OutFrame& frame : tx) {
    if (frame.part.get() != &part) continue;
    if (!frame.copied) frame.copy_segment();
    frame.part = nullptr;
  }
  // What is done on all ranks, or starts again, need not be sent again.
  for (Flight& flight : flights.all()) {
    if (flight.part.get() != &part) continue;
    flight.part = nullptr;
    flight.item = {};  // it may hold an encoded segment
  }
}

}  // namespace ringfold
